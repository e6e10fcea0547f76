"""Proof: the traced program runs for real, rank by rank over gloo, and must equal Transformers' own model.

``run_cell(config, Cell(tp=4, dcp=2))`` is all there is to call; see :mod:`tensor_cast.proof.compare`. Names are
imported when they are asked for: making a config small (:mod:`tensor_cast.proof.shrink`) needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensor_cast.proof.cell import Cell
    from tensor_cast.proof.compare import CellResult, run_cell
    from tensor_cast.proof.launch import RankError, RankPool, close_shared_pool, shared_pool

__all__ = ["Cell", "CellResult", "RankError", "RankPool", "close_shared_pool", "run_cell", "shared_pool"]

_HOME = {
    "Cell": "cell",
    "CellResult": "compare",
    "run_cell": "compare",
    **dict.fromkeys(("RankError", "RankPool", "close_shared_pool", "shared_pool"), "launch"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
