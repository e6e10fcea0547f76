"""Searches on fake prices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from serving_fakes import FakeFactory

from serving_cast.config import Limits, Mode, OptimizerConfig, SearchSpace, Workload
from serving_cast.parallel_runner import ParallelRunner
from serving_cast.setting import make_setting


def config(**values: Any) -> OptimizerConfig:
    """A search of DeepSeek-V3 on eight H200, unless told otherwise."""
    defaults: dict[str, Any] = {
        "model": "deepseek-ai/DeepSeek-V3",
        "devices": ("H200_SXM",),
        "num_devices": 8,
        "workload": Workload(2000, 500),
        "limits": (Limits(),),
        "space": SearchSpace(),
        "mode": Mode.AGGREGATED,
    }
    return OptimizerConfig(**(defaults | values))


@pytest.fixture
def make_config() -> Callable[..., OptimizerConfig]:
    return config


@pytest.fixture
def make_runner() -> Callable[..., ParallelRunner]:
    """``make_runner(costs={...}, num_devices=16, ...)``: a runner on fake costs."""

    def make(*, costs: Mapping[str, Any] | None = None, **values: Any) -> ParallelRunner:
        asked = config(**values)
        return ParallelRunner(make_setting(asked, asked.devices[0]), costs=FakeFactory(**(costs or {})))

    return make
