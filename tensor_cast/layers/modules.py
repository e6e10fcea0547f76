"""Copying module trees without copying weights, and knowing where a module stood in the original model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

_PATH = "tensor_cast_path"


def clone_tree(module: nn.Module, path: str, replacements: Mapping[str, nn.Module] | None = None) -> nn.Module:
    """A copy of the tree under ``module`` that shares parameters and buffers; the original stays as it is.

    Args:
        module: root of the tree.
        path: its name in the whole model; the copies remember theirs, see :func:`path_of`.
        replacements: modules to put in place of those at the given paths, as they are.
    """
    if replacements and path in replacements:
        return replacements[path]
    clone = type(module).__new__(type(module))
    clone.__dict__.update(module.__dict__)
    clone.__dict__["_parameters"] = dict(module._parameters)
    clone.__dict__["_buffers"] = dict(module._buffers)
    clone.__dict__["_modules"] = {
        name: None if child is None else clone_tree(child, f"{path}.{name}" if path else name, replacements)
        for name, child in module._modules.items()
    }
    clone.__dict__[_PATH] = path
    return clone


def path_of(module: nn.Module) -> str | None:
    """Full name of a cloned module in the model it came from; None for a module that is not a clone."""
    return module.__dict__.get(_PATH)


def set_path(module: nn.Module, path: str) -> None:
    """Give a module that stands in for another the other's path."""
    module.__dict__[_PATH] = path


def wrap_forward(module: nn.Module, wrapper: Callable[..., Any]) -> None:
    """Make calls of ``module`` go through ``wrapper(inner, *args, **kwargs)``; ``inner`` is its present forward.

    The instance keeps its class, so code that looks at types or attributes sees no difference.
    """
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return wrapper(inner, *args, **kwargs)

    module.__dict__["forward"] = forward


def on_first_tensor(output: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``function`` applied to a tensor, or to the first element of a tuple."""
    if isinstance(output, tuple):
        return (function(output[0]), *output[1:])
    return function(output)
