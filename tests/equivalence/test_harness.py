"""The harness itself: ranks, their failures, the groups of a layout, and that a fault is found where it is."""

from __future__ import annotations

import time
from pathlib import Path

import faults
import psutil
import pytest
import torch
from families import FAMILIES, family

from tensor_cast.errors import ConfigError, LegalityError
from tensor_cast.layers.context import ParallelContext
from tensor_cast.parallel import axis_ranks
from tensor_cast.proof import Cell, RankError, RankPool, run_cell, shared_pool
from tensor_cast.proof.compare import TOLERANCE
from tensor_cast.proof.launch import axis_group
from tensor_cast.proof.precision import KeepDouble

# -- ranks ------------------------------------------------------------------------------------------------------------


def test_a_pool_runs_functions_in_rank_order() -> None:
    pool = shared_pool(4)
    assert pool.run(faults.double, [(1,), (2,), (3,)]) == [2, 4, 6]
    processes = pool.run(faults.name_and_threads, [()] * 4)
    assert len({pid for pid, _ in processes}) == 4
    assert {threads for _, threads in processes} == {1}
    assert pool.run(faults.name_and_threads, [()] * 4) == processes  # the same processes serve again


def test_a_rank_that_raises_is_named_with_its_traceback() -> None:
    pool = shared_pool(4)
    with pytest.raises(RankError, match=r"(?s)rank 1 of 3 failed:.*in fail.*ValueError: a fault on purpose") as caught:
        pool.run(faults.fail, [(0,), (1,), (2,)])
    assert set(caught.value.failures) == {1}
    assert pool.alive  # everyone answered, nobody is stuck
    assert pool.run(faults.double, [(5,)]) == [10]


def test_a_rank_that_ends_takes_the_pool_with_it() -> None:
    pool = RankPool(2)
    children = [psutil.Process(pid) for pid, _ in pool.run(faults.name_and_threads, [()] * 2)]
    with pytest.raises(RankError, match="rank 1 of 2 failed:\nthe process ended with exit code 7"):
        pool.run(faults.vanish, [(0,), (1,)])
    assert not pool.alive
    assert _gone(children)


def test_a_rank_that_does_not_answer() -> None:
    pool = RankPool(2, timeout_s=1.0)
    children = [psutil.Process(pid) for pid, _ in pool.run(faults.name_and_threads, [()] * 2)]
    folder = Path(pool._folder)
    started = time.monotonic()
    with pytest.raises(RankError, match="rank 1 of 2 failed:\nno answer within 1 s"):
        pool.run(faults.sleep, [(0.0,), (60.0,)])
    assert time.monotonic() - started < 40
    assert _gone(children)
    assert not folder.exists()


def _gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=5)
    return not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    "cell",
    [Cell(tp=4, dcp=2), Cell(tp=4, dp=2, ep=8, dcp=4), Cell(tp=2, dp=2, ep=2), Cell(tp=2, dp=4, ep=2, moe_dp=4)],
    ids=lambda cell: cell.label,
)
def test_groups_are_those_of_the_planner(cell: Cell) -> None:
    """Rank 0's groups are the planner's, and the groups of an axis divide the ranks among them."""
    for axis in ("tp", "dcp", "dp", "ep"):
        assert axis_group(cell.context, axis) == axis_ranks(cell.parallel, axis)
        groups = [axis_group(cell.context.at(rank), axis) for rank in range(cell.ranks)]
        assert all(rank in group for rank, group in enumerate(groups))
        assert sorted(rank for group in set(groups) for rank in group) == list(range(cell.ranks))


# -- faults -----------------------------------------------------------------------------------------------------------


def test_a_forgotten_all_reduce_is_found_in_its_layer() -> None:
    result = run_cell(family("llama"), Cell(tp=2), inside=faults.no_reduce_in_second_layer)
    assert not result.equal
    assert result.max_abs_difference > 1e-3
    assert result.first_mismatch is not None
    assert result.first_mismatch.startswith(
        "prompt, rank 0, request 0, token at position 0: first wrong after layer 1, logits differ by "
    )
    assert result.trace_difference is not None
    assert "model.layers.1.mlp" in result.trace_difference
    assert "all_reduce" in result.trace_difference


def test_a_fault_behind_the_layers_is_found_there() -> None:
    result = run_cell(family("llama"), Cell(tp=2), inside=faults.head_scaled, record=False)
    assert not result.equal
    assert 1e-8 < result.max_abs_difference < 1e-4
    assert result.first_mismatch is not None
    assert "right after the last layer, wrong after the head" in result.first_mismatch


def test_an_op_that_is_not_in_the_trace_is_found() -> None:
    result = run_cell(family("llama"), Cell(tp=2), inside=faults.superfluous_op)
    assert result.equal
    assert result.trace_difference is not None
    assert result.trace_difference.startswith("decode op ")
    assert "executed aten.add in model.layers.0.self_attn" in result.trace_difference


def test_faults_end_with_their_run() -> None:
    result = run_cell(family("llama"), Cell(tp=2))
    assert (result.equal, result.trace_difference) == (True, None)


def test_a_layout_that_cannot_be_cut() -> None:
    with pytest.raises(LegalityError, match=r"dcp\.divides_tp"):
        run_cell(family("llama"), Cell(tp=4, dcp=3))
    with pytest.raises(ConfigError, match="'handover' or 'chunks'"):
        Cell(prefill="somehow")


# -- precision --------------------------------------------------------------------------------------------------------


def test_keeping_double() -> None:
    x = torch.rand(4, 5, dtype=torch.float64)
    with KeepDouble():
        kept = [x.float(), x.to(torch.float32), x.type(torch.float32), x.softmax(-1, dtype=torch.float32), x.bfloat16()]
        half = torch.rand(3).half()
        assert x.long().dtype == torch.int64
    assert [t.dtype for t in kept] == [torch.float64] * 5
    assert torch.equal(kept[0], x)
    assert torch.equal(kept[3], x.softmax(-1))
    assert half.dtype == torch.float16  # only what is float64 stays
    assert x.float().dtype == torch.float32


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_in_the_models_own_dtype(name: str) -> None:
    """float32 throughout, as the code stands: what is left is rounding, orders above the tolerance in float64."""
    result = run_cell(family(name), Cell(tp=2, query=3), double=False, record=False)
    assert result.equal, result.first_mismatch
    assert TOLERANCE < result.max_abs_difference < result.tolerance


def test_context_of_a_cell() -> None:
    cell = Cell(tp=4, dp=2, ep=8, dcp=2, semantics="vllm", interleave=4)
    assert cell.context == ParallelContext(tp=4, dp=2, ep=8, dcp=2, dcp_semantics="vllm", interleave=4)
    assert cell.label == "tp4-dp2-ep8-dcp2.vllm-i4-bs4-q1"
    assert cell.requests(1) == (8, 11, 1)
