"""Engine files: defaults as the engines have them, each with its source."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tensor_cast.config_files import config_root
from tensor_cast.device.catalog import load_device
from tensor_cast.engine.catalog import default_engine, engine_names, load_engine
from tensor_cast.engine.dcp import semantics_names
from tensor_cast.errors import ConfigError, UnknownNameError
from tensor_cast.model_config import AttentionKind


def test_engines() -> None:
    assert engine_names() == ["vllm", "vllm-ascend"]
    for name in engine_names():
        engine = load_engine(name)
        assert engine.name == name
        assert engine.dcp_semantics == name
        assert engine.dcp_semantics in semantics_names()


def test_defaults_of_the_engines() -> None:
    vllm, ascend = load_engine("vllm"), load_engine("vllm-ascend")
    assert (vllm.gpu_memory_utilization, ascend.gpu_memory_utilization) == (0.92, 0.92)
    assert [vllm.block_size_for(kind) for kind in AttentionKind] == [16, 64, 64]
    assert [ascend.block_size_for(kind) for kind in AttentionKind] == [128, 128, 128]


def test_collectives_cost_memory_once_there_is_a_second_device() -> None:
    # Start-up logs of vLLM 0.19 on H100: 0.25 GiB on one device, 2.09 to 2.21 GiB on two and four.
    vllm = load_engine("vllm")
    assert vllm.non_torch_gib_for(1) == pytest.approx(0.25)
    assert 2.09 <= vllm.non_torch_gib_for(2) == vllm.non_torch_gib_for(4) <= 2.21


@pytest.mark.parametrize(
    ("device", "engine"),
    [(None, "vllm-ascend"), ("ATLAS_800_A2_376T_64G", "vllm-ascend"), ("H200_SXM", "vllm"), ("MI300X", "vllm")],
)
def test_the_engine_follows_the_vendor(device: str | None, engine: str) -> None:
    assert default_engine(None if device is None else load_device(device)) == engine


def test_names() -> None:
    assert load_engine("VLLM_Ascend") is load_engine("vllm-ascend")
    with pytest.raises(UnknownNameError, match="unknown engine 'vlm'; did you mean vllm"):
        load_engine("vlm")


def test_each_value_needs_a_source(tmp_path: Path) -> None:
    raw = yaml.safe_load((config_root() / "engines" / "vllm.yaml").read_text())
    path = tmp_path / "mine.yaml"
    del raw["sources"]["block_size"]
    path.write_text(yaml.safe_dump(raw))
    with pytest.raises(ConfigError, match="sources: no source for block_size"):
        load_engine(str(path))
    raw["sources"]["blok_size"] = raw["sources"]["block_size"] = "me"
    path.write_text(yaml.safe_dump(raw))
    with pytest.raises(ConfigError, match="blok_size is no value of an engine"):
        load_engine(str(path))
