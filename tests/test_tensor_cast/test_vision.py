"""Parameters of vision towers against Transformers' own classes, and what a rank of an engine holds of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Mistral3Config, Mistral3ForConditionalGeneration

from tensor_cast.core.capacity import CapacityPlanner
from tensor_cast.core.capacity_config import CapacityConfig
from tensor_cast.engine.vision import vision_bytes
from tensor_cast.model_catalog import load_model_config
from tensor_cast.units import GIB

SIGLIP: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "image_size": 896,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
    "vision_use_head": False,
}
PIXTRAL: dict[str, Any] = {
    "model_type": "pixtral",
    "hidden_size": 1024,
    "image_size": 1540,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "patch_size": 14,
}


@pytest.mark.parametrize(
    ("vision", "config", "model", "text"),
    [
        (SIGLIP, Gemma3Config, Gemma3ForConditionalGeneration, {"model_type": "gemma3_text"}),
        (PIXTRAL, Mistral3Config, Mistral3ForConditionalGeneration, {"model_type": "mistral"}),
    ],
)
def test_parameters_beside_the_language_model(vision: dict[str, Any], config: Any, model: Any, text: Any) -> None:
    sizes = {"hidden_size": 512, "num_hidden_layers": 1, "num_attention_heads": 8, "intermediate_size": 64}
    with torch.device("meta"):
        whole = model(config(vision_config=vision, text_config={**text, **sizes, "vocab_size": 64}))
    beside = sum(
        p.numel() for name, p in whole.named_parameters() if "language_model" not in name and "lm_head" not in name
    )
    described = replace(load_model_config("google/gemma-3-27b-it"), vision=vision, hidden_size=512)
    assert vision_bytes(described, 1) == 2 * beside


def test_a_rank_holds_its_heads() -> None:
    gemma = load_model_config("google/gemma-3-27b-it")
    assert gemma.vision == SIGLIP
    # 27 layers of four 1152 x 1152 and two 1152 x 4304 matrices with the biases of their outputs.
    split = 27 * (4 * 1152**2 + 2 * 1152 * 4304 + 3 * 1152 + 4304)
    assert vision_bytes(gemma, 1) - vision_bytes(gemma, 4) == 2 * split * 3 // 4
    assert vision_bytes(gemma, 3) == vision_bytes(gemma, 1)  # 16 heads do not divide


def test_models_without_one_and_unknown_ones() -> None:
    llama = load_model_config("meta-llama/Llama-3.1-8B")
    assert llama.vision is None
    assert vision_bytes(llama, 1) == 0
    assert vision_bytes(replace(llama, vision={"model_type": "other", "hidden_size": 8}), 1) == 0


def test_published_start_up_of_gemma_3() -> None:
    """51.45 GiB with the rotary tables; the tower is on the first stage alone."""
    options = {"model": "google/gemma-3-27b-it", "device": "H100_SXM", "max_model_len": 8192}
    planner = CapacityPlanner(CapacityConfig.create(**options))
    memory = planner.memory
    tables = memory.buffers - memory.workspaces.persistent
    assert (memory.weights(0, 62) + tables) / GIB == pytest.approx(51.45, rel=0.003)
    assert memory.weights(31, 62) == memory.model_weights.of(31, 62)
    assert memory.weights(0, 31) - memory.model_weights.of(0, 31) == vision_bytes(planner.model, 1)
