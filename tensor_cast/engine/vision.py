"""Weights of the vision tower that an engine loads beside a multimodal model's language model, from its config.

Only what stays on a device is counted: the tower is neither traced nor priced, and the activations of its own profile
run are left out. Kinds of towers that are not listed count nothing.
Source: vLLM 0.30 ``models/{siglip,pixtral,gemma3_mm,mistral3}.py``: attention and feed-forward matrices are split over
tp where it divides the heads, the rest is on every rank; with pipeline stages the tower is on the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tensor_cast.dtypes import bits_of
from tensor_cast.model_config import ModelConfig

__all__ = ["vision_bytes"]


@dataclass(frozen=True)
class _Tower:
    """A kind of tower.

    Args:
        biases: whether linears and norms have them.
        gated: whether the feed-forward block has a gate.
        positions: whether there is a learned vector for each patch of the largest image.
        norms: norms outside of the layers.
    """

    biases: bool
    gated: bool
    positions: bool
    norms: int


_TOWERS = {
    "siglip_vision_model": _Tower(biases=True, gated=False, positions=True, norms=1),
    "pixtral": _Tower(biases=False, gated=True, positions=False, norms=1),
}


def vision_bytes(model: ModelConfig, tp: int) -> int:
    """Bytes on one of ``tp`` ranks; 0 for a model without a vision tower, or with one that is not known."""
    config = model.vision
    tower = None if config is None else _TOWERS.get(str(config.get("model_type")))
    if config is None or tower is None:
        return 0
    split, whole = _elements(config, tower)
    ways = tp if int(config["num_attention_heads"]) % tp == 0 else 1
    return (split // ways + whole + _projector(config, model)) * bits_of(model.dtype) // 8


def _elements(config: Mapping[str, Any], tower: _Tower) -> tuple[int, int]:
    """(parameters that are split over tp, parameters that every rank holds)."""
    width, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    layers, patch = int(config["num_hidden_layers"]), int(config["patch_size"])
    matrices = 4 * width * width + (3 if tower.gated else 2) * width * inner
    # Biases of column-parallel linears (q, k, v, fc1) are split, those of row-parallel ones (out, fc2) are not.
    split_biases, whole_biases = (3 * width + inner, 2 * width) if tower.biases else (0, 0)
    norm = width * (2 if tower.biases else 1)
    whole = layers * (2 * norm + whole_biases) + tower.norms * norm
    whole += width * 3 * patch * patch + (width if tower.biases else 0)
    if tower.positions:
        whole += (int(config["image_size"]) // patch) ** 2 * width
    return layers * (matrices + split_biases), whole


def _projector(config: Mapping[str, Any], model: ModelConfig) -> int:
    """Parameters between tower and language model."""
    width, hidden = int(config["hidden_size"]), model.hidden_size
    if config["model_type"] == "pixtral":
        # A norm, a merger of 2 x 2 patches, and two linears.
        return width + 4 * width * width + width * hidden + hidden * hidden
    return width * hidden + width
