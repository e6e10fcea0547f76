"""One set of random weights per model and seed: the same in every process, whatever the layout."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import nn
from transformers import PreTrainedModel

from tensor_cast.layers.program import Anatomy
from tensor_cast.model_config import ModelConfig
from tensor_cast.tracer.builder import build


def randomise(model: nn.Module, seed: int) -> nn.Module:
    """Fill every parameter and persistent buffer so that every part of the model matters to the result.

    Matrices keep the scale of their input, norms lie around 1, biases and sinks are clearly not zero. Numbers are drawn
    in float64 in the order of the state dict, so all dtypes get the same ones.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            if "norm" in name:
                tensor.copy_(1 + 0.1 * noise)
            else:
                tensor.copy_(noise * tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 0.3 * noise)
    return model


def random_model(config: ModelConfig, seed: int, *, double: bool) -> PreTrainedModel:
    """The whole model with random weights; all of it in float64 if ``double``, else as the configuration says."""
    model = build(config, dtype=torch.float64 if double else None)
    if double:
        model = model.double()  # routers and rotary tables, which are float32 in every model
    return randomise(model, seed)


@lru_cache(maxsize=4)
def random_anatomy(config: ModelConfig, seed: int, double: bool) -> Anatomy:
    """:func:`random_model`, ready to be cut. Kept, since many runs in a row use the same one."""
    return Anatomy(random_model(config, seed, double=double))
