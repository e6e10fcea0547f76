"""Transformers' own model: whole, with its own attention, experts and cache, one request at a time."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from tensor_cast.layers.structure import find_layers
from tensor_cast.model_config import ModelConfig
from tensor_cast.proof.cell import Cell
from tensor_cast.proof.precision import KeepDouble
from tensor_cast.proof.session import token_ids
from tensor_cast.proof.weights import random_model


@dataclass(frozen=True)
class Reference:
    """What the whole model says about one request.

    Args:
        logits: per step [tokens, V]: the prompt, then what stays of each decode step.
        layers: per step [L, tokens, H].
    """

    logits: list[np.ndarray]
    layers: list[np.ndarray]


@lru_cache(maxsize=2)
def whole_model(config: ModelConfig, seed: int, double: bool) -> PreTrainedModel:
    """Transformers' model with eager attention and experts and the weights of :func:`random_model`."""
    ours = random_model(config, seed, double=double)
    theirs_config = copy.deepcopy(ours.config)
    theirs_config._experts_implementation = "eager"
    theirs_config.use_cache = True
    dtype = torch.float64 if double else getattr(torch, config.dtype)
    theirs = AutoModelForCausalLM.from_config(theirs_config, dtype=dtype, attn_implementation="eager").eval()
    if double:
        theirs = theirs.double()
    theirs.config._experts_implementation = "eager"
    theirs.load_state_dict(ours.state_dict())
    return theirs


def reference(config: ModelConfig, cell: Cell, dp_rank: int, request: int, seed: int, double: bool) -> Reference:
    """Run one request of one DP rank through the whole model."""
    ids = token_ids(cell, dp_rank, config.vocab_size, seed)[request]
    pieces = tuple(cell.pieces(dp_rank, request))
    return _run(config, tuple(ids[: sum(pieces)].tolist()), pieces, seed, double)


@lru_cache(maxsize=256)
def _run(config: ModelConfig, ids: tuple[int, ...], pieces: tuple[int, ...], seed: int, double: bool) -> Reference:
    model = whole_model(config, seed, double)
    outputs: list[torch.Tensor] = []

    def note(module: Any, args: Any, output: Any) -> None:
        outputs.append((output[0] if isinstance(output, tuple) else output)[0].clone())

    _, layers = find_layers(model, model.config.num_hidden_layers)
    hooks = [layer.register_forward_hook(note) for layer in layers]
    cache = DynamicCache(config=model.config)
    run = Reference([], [])
    start = 0
    try:
        with torch.inference_mode(), KeepDouble() if double else nullcontext():
            for length in pieces:
                outputs.clear()
                chunk = torch.tensor([ids[start : start + length]])
                run.logits.append(model(input_ids=chunk, cache=cache, use_cache=True).logits[0].numpy())
                run.layers.append(torch.stack(outputs).numpy())
                start += length
    finally:
        for hook in hooks:
            hook.remove()
    return run
