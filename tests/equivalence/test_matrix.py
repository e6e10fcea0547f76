"""Every cell: the ranks compute what Transformers' whole model computes, by exactly the ops of the symbolic trace."""

from __future__ import annotations

from typing import Any

import pytest
from families import FAMILIES, family
from matrix import BLOCK_SIZES, DCP, QUERIES, TP, Entry, all_entries, ci_entries, touched

from tensor_cast.engine.dcp import semantics_names
from tensor_cast.model_config import AttentionKind
from tensor_cast.proof import Cell, run_cell

_CI = frozenset(entry.id for entry in ci_entries())


def _parameters() -> list[Any]:
    return [pytest.param(e, id=e.id, marks=() if e.id in _CI else pytest.mark.slow) for e in all_entries()[0]]


def compared(cell: Cell, vocab: int) -> int:
    """Logits of every prompt token and of every token that stays, on every rank."""
    tokens = sum(
        sum(cell.pieces(dp_rank, request)) for dp_rank in range(cell.dp) for request in range(len(cell.prompts))
    )
    return tokens * vocab * cell.tp


@pytest.mark.parametrize("entry", _parameters())
def test_cell(entry: Entry) -> None:
    result = run_cell(entry.config, entry.cell)
    assert result.equal, f"{result.first_mismatch} (largest difference {result.max_abs_difference:.3g})"
    assert result.compared == compared(entry.cell, entry.config.vocab_size)
    assert result.trace_difference is None
    assert result.recorded > 100


# -- what the matrix holds --------------------------------------------------------------------------------------------


def test_every_combination_is_legal_or_counted() -> None:
    """No cell is left out but by one of the product's rules; by which, and how often, stands here."""
    legal, forbidden = all_entries()
    assert len({entry.id for entry in legal}) == len(legal) == LEGAL
    assert dict(forbidden) == FORBIDDEN


LEGAL = 3410
FORBIDDEN = {
    "dcp.kv_heads": 1148,
    "dcp.kv_copies": 360,
    "dcp.sliding_window": 736,
    "dcp.interleave_mtp": 150,
    "dcp.sparse_attention": 160,
    "ep.experts": 224,
}


def test_ci_touches_everything() -> None:
    """Spelled out apart from the choice itself: every family, axis value, semantics, interleave and query length."""
    ci = ci_entries()
    assert {entry.family for entry in ci} == set(FAMILIES)
    assert set().union(*map(touched, ci)) == set().union(*map(touched, all_entries()[0]))
    for name in FAMILIES:
        cells = [entry.cell for entry in ci if entry.family == name]
        windowed = any(window is not None for window in family(name).layer_windows)
        assert {cell.tp for cell in cells} == set(TP)
        assert {cell.query for cell in cells} == set(QUERIES)
        assert {cell.block_size for cell in cells} == set(BLOCK_SIZES)
        assert {cell.dcp for cell in cells} == ({1} if windowed else set(DCP))
        if not windowed:
            split = [cell for cell in cells if cell.dcp > 1]
            sparse = family(name).attention is AttentionKind.DSA
            assert {cell.semantics for cell in split} == set(semantics_names()) - ({"rfc"} if sparse else set())
            assert {cell.interleave == 1 for cell in split} == {True, False}
            assert {cell.prefill for cell in split} == {"handover", "chunks"}
        if family(name).is_moe:
            assert {cell.dp for cell in cells} == {1, 2}
            assert {1, 2, 4} <= {cell.ep for cell in cells}
        heads = {(cell.tp > entry.kv_heads) for entry in ci if entry.family == name and (cell := entry.cell)}
        assert heads == ({True, False} if entry_has_heads(name) else {True})


def entry_has_heads(name: str) -> bool:
    return any(entry.kv_heads for entry in ci_entries() if entry.family == name)


def test_contexts_are_ragged_and_some_shards_are_empty() -> None:
    lengths = Cell().prompts
    assert len(set(lengths)) == len(lengths)
    assert lengths[0] < 2  # with dcp 2 and more, ranks after the first hold nothing of this prompt
    assert lengths[1] % (4 * 2) == 0  # a full logical block, so the first decode step opens another
