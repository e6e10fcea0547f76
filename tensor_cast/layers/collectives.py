"""Functional collectives by axis name.

The group name is the axis (``"tp"``, ``"dcp"``, ``"dp"``): on fake tensors no process group is needed, on real ones a
group must be registered under that name.
"""

from __future__ import annotations

import torch

_C10D = torch.ops._c10d_functional


def all_reduce(x: torch.Tensor, axis: str) -> torch.Tensor:
    """Sum of ``x`` over the ranks of ``axis``."""
    return _C10D.wait_tensor(_C10D.all_reduce(x.contiguous(), "sum", axis))


def all_gather(x: torch.Tensor, axis: str, size: int, dim: int = 0) -> torch.Tensor:
    """The ``size`` ranks' tensors concatenated along ``dim``."""
    gathered = _C10D.wait_tensor(_C10D.all_gather_into_tensor(x.contiguous(), size, axis))
    dim %= x.dim()
    if dim == 0:
        return gathered
    shape = list(x.shape)
    shape[dim] = shape[dim] * size
    return gathered.view(size, *x.shape).movedim(0, dim).reshape(shape)


def reduce_scatter(x: torch.Tensor, axis: str, size: int) -> torch.Tensor:
    """This rank's slice along dim 0 of the sum over the ranks."""
    return _C10D.wait_tensor(_C10D.reduce_scatter_tensor(x.contiguous(), "sum", size, axis))


def all_to_all(x: torch.Tensor, axis: str, size: int) -> torch.Tensor:
    """Slice i along dim 0 goes to rank i; the result holds the slices received, in rank order."""
    splits = [x.shape[0] // size] * size
    return _C10D.wait_tensor(_C10D.all_to_all_single(x.contiguous(), splits, splits, axis))
