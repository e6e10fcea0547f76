"""Shapes of the commonest ops without torch's symbolic machinery.

On symbolic sizes torch works out the result of a broadcast multiplication in Python, step by step, in milliseconds. The
same op on tensors of the sizes that stand behind the symbols (``device="meta"``: no data) takes microseconds in C++ and
lays the result out the same way. So the sample decides type and order of strides, and the symbols are put back in. An
op that is not covered here takes torch's own way; a test holds both against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_ATEN = torch.ops.aten

_NAMES = """mul add sub div neg silu gelu sigmoid tanh exp rsqrt sqrt pow cos sin relu clamp logical_or logical_not eq
    ne lt le gt ge masked_fill where maximum minimum bitwise_not polar"""
_POINTWISE = frozenset(getattr(_ATEN, name) for name in _NAMES.split())
_LINEAR, _CAT, _CONVERT = _ATEN.linear, _ATEN.cat, _ATEN.to


def quick_result(func: Any, args: Sequence[Any], kwargs: Any) -> torch.Tensor | None:
    """Result of ``func`` on fake tensors with symbolic sizes, or None where torch has to find out itself."""
    packet = func.overloadpacket
    if packet in _POINTWISE:
        return _pointwise(func, args, kwargs)
    if kwargs:
        return None
    if packet is _LINEAR and args[0].dim() > 1 and _symbolic(args[0]):
        x, weight = args[:2]
        if x.shape[-1] != weight.shape[1]:
            return None  # torch says best what is wrong
        return torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype)
    if packet is _CAT and all(map(_symbolic, args[0])):
        return _cat(*args)
    if packet is _CONVERT and func is _CONVERT.dtype and args[1] != args[0].dtype:
        return _pointwise(lambda x, *_: x.to(args[1]), args[:1], {})
    return None


def _symbolic(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and any(type(size) is not int for size in tensor.shape)


def _hint(size: Any) -> int:
    return size if type(size) is int else size.node.hint


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    sizes, strides = map(_hint, tensor.shape), map(_hint, tensor.stride())
    return torch.empty_strided(tuple(sizes), tuple(strides), dtype=tensor.dtype, device="meta")


def _pointwise(func: Callable[..., torch.Tensor], args: Sequence[Any], kwargs: Any) -> torch.Tensor | None:
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if not any(map(_symbolic, tensors)):
        return None
    if any(isinstance(a, torch.SymInt | torch.SymFloat) for a in args):
        return None
    sample = _run(func, [_sample(a) if isinstance(a, torch.Tensor) else a for a in args], kwargs)
    shape = []
    for position, size in enumerate(sample.shape):
        back = sample.dim() - position
        sizes = [t.shape[-back] for t in tensors if t.dim() >= back]
        shape.append(next(s for s in sizes if _hint(s) == size))
    return _laid_out(shape, sample)


def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    sample = _run(torch.cat, [[_sample(t) for t in tensors], dim], {})
    shape = list(tensors[0].shape)
    shape[dim] = sum(t.shape[dim] for t in tensors)
    return _laid_out(shape, sample)


def _run(func: Callable[..., torch.Tensor], args: Sequence[Any], kwargs: Any) -> torch.Tensor:
    with torch._C._DisableTorchDispatch():
        return func(*args, **kwargs)


def _laid_out(shape: Sequence[Any], sample: torch.Tensor) -> torch.Tensor:
    """A dense tensor of ``shape`` whose dimensions lie in memory in the order of the sample's."""
    order = sorted(range(len(shape)), key=lambda d: (-sample.stride(d), d))
    strides: list[Any] = [1] * len(shape)
    step: Any = 1
    for dim in reversed(order):
        strides[dim] = step
        step = step * shape[dim]
    return torch.empty_strided(tuple(shape), tuple(strides), dtype=sample.dtype)
