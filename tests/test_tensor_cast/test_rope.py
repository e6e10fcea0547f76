"""Bytes of rotary tables, by hand from each config."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tensor_cast.engine.rope import rope_cache_bytes
from tensor_cast.model_catalog import describe, load_model_config


@pytest.mark.parametrize(
    ("model", "nbytes"),
    [
        ("meta-llama/Llama-3.1-8B", 131_072 * 128 * 2),  # its scaling stretches no table
        ("Qwen/Qwen3-30B-A3B", 40_960 * 128 * 2),
        ("deepseek-ai/DeepSeek-V3", 40 * 4096 * 64 * 2),  # yarn: 40 times the original positions; the rope part alone
        ("openai/gpt-oss-120b", 32 * 4096 * 64 * 2),
        ("zai-org/GLM-5.3", 1_048_576 * 64 * 2),
        # Eight times 131,072 positions for the full layers, and a table of its own for the windowed ones. Start-up logs
        # of Gemma 3 12B, whose heads are twice as wide, are 0.56 GiB above parameters and vision tower.
        ("google/gemma-3-27b-it", 9 * 131_072 * 128 * 2),
    ],
)
def test_embedded_models(model: str, nbytes: int) -> None:
    assert rope_cache_bytes(load_model_config(model)) == nbytes


@pytest.mark.parametrize(
    ("changes", "elements"),
    [
        ({"partial_rotary_factor": 0.5}, 40_960 * 64),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, 4 * 40_960 * 128),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 4 * 40_960 * 128),
        (
            {"rope_parameters": {"full": {"rope_type": "linear", "factor": 2.0}, "windowed": {"rope_theta": 1e4}}},
            3 * 40_960 * 128,
        ),
        ({"rope_parameters": {"full": {"rope_theta": 1e4}, "windowed": {"rope_theta": 1e4}}}, 40_960 * 128),
    ],
)
def test_other_parameters(changes: dict[str, Any], elements: int) -> None:
    config = json.loads(load_model_config("Qwen/Qwen3-8B").hf_config)
    assert rope_cache_bytes(describe({**config, **changes}, "m", "config")) == elements * 2
