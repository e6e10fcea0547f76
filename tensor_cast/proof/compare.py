"""Running a cell and saying whether the ranks computed what the whole model computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensor_cast.model_config import ModelConfig
from tensor_cast.proof.cell import Cell
from tensor_cast.proof.launch import RankPool, shared_pool
from tensor_cast.proof.record import first_difference, step_sizes, tracing
from tensor_cast.proof.reference import Reference, reference
from tensor_cast.proof.session import Inside, Job, RankRun, run_rank

#: Largest difference of two logits that counts as equal. Logits are of order 1; 1e-10 is what sums of a few hundred
#: float64 numbers in another order cannot reach, and any wrong shard exceeds by far.
TOLERANCE = 1e-10
#: The same when the model runs in float32: HF's own norms and softmax are float32 too, and errors add up over layers.
TOLERANCE_FLOAT32 = 1e-4


@dataclass(frozen=True)
class CellResult:
    """Outcome of one cell.

    Args:
        equal: whether every compared number is within the tolerance.
        compared: logits compared, over all ranks and steps.
        max_abs_difference: the largest difference among them; NaN if any was not a number.
        first_mismatch: where the first wrong one is, in a sentence; None if equal.
        tolerance: what counted as equal.
        trace_difference: where the executed ops and the symbolic trace part; None if they do not or were not recorded.
        recorded: ops that were recorded and compared with the trace.
    """

    equal: bool
    compared: int
    max_abs_difference: float
    first_mismatch: str | None
    tolerance: float
    trace_difference: str | None = None
    recorded: int = 0


def run_cell(
    config: ModelConfig,
    cell: Cell,
    *,
    seed: int = 0,
    double: bool = True,
    compare: bool = True,
    record: bool = True,
    inside: Inside | None = None,
    pool: RankPool | None = None,
) -> CellResult:
    """Run a tiny model in the layout of ``cell`` and compare it with Transformers' own model.

    Args:
        config: the model; small enough to run.
        cell: layout and requests. Whether the layout is legal for the model is the caller's question.
        seed: of weights and tokens.
        double: everything in float64 on both sides (tolerance :data:`TOLERANCE`); else as the configuration says.
        compare: whether to compare logits.
        record: whether to compare the executed ops with the symbolic trace.
        inside: context manager factory, importable by name, that every rank enters around its work.
        pool: where to run; :func:`shared_pool` when absent.

    Raises:
        RankError: a rank failed.
        LegalityError: the layout cannot be cut.
    """
    cell.context  # noqa: B018 - raises in this process, where it reads best
    job = Job(config, cell, seed, double, compare, record, inside)
    runs = (pool or shared_pool(cell.ranks)).run(run_rank, [(job, rank) for rank in range(cell.ranks)])
    difference, recorded = None, 0
    if record:
        for phase, ops in runs[0].ops.items():
            found = first_difference(ops, tracing(config).ops(cell, phase), step_sizes(cell, phase))
            recorded += len(ops)
            if found and difference is None:
                difference = f"{phase} {found}"
    tolerance = TOLERANCE if double else TOLERANCE_FLOAT32
    judged = _judge(config, cell, runs, tolerance, seed, double) if compare else (True, 0, 0.0, None)
    return CellResult(*judged, tolerance, difference, recorded)


def _judge(
    config: ModelConfig, cell: Cell, runs: Sequence[RankRun], tolerance: float, seed: int, double: bool
) -> tuple[bool, int, float, str | None]:
    compared, largest = 0, 0.0
    mismatches: list[tuple[tuple[int, ...], str]] = []
    for rank, run in enumerate(runs):
        dp_rank = rank // cell.tp
        for request in range(len(cell.prompts)):
            wanted = reference(config, cell, dp_rank, request, seed, double)
            for step, logits in enumerate(wanted.logits):
                tokens = len(logits)
                gap = np.abs(run.logits[step][request, :tokens] - logits)
                compared += gap.size
                largest = float(np.maximum(largest, gap.max()))  # keeps a NaN
                wrong = ~(gap <= tolerance).all(axis=-1)
                wrong |= run.sampled[step][request, :tokens] != logits.argmax(-1)
                if wrong.any():
                    token = int(wrong.argmax())
                    place = _place(run, wanted, step, request, token, tolerance)
                    start = sum(len(x) for x in wanted.logits[:step])
                    what = "prompt" if step == 0 else f"decode step {step}"
                    sentence = (
                        f"{what}, rank {rank}, request {request}, token at position {start + token}: {place}, "
                        f"logits differ by {float(gap[token].max()):.3g}"
                    )
                    mismatches.append(((step, start + token, rank), sentence))
    first = min(mismatches)[1] if mismatches else None
    return first is None, compared, largest, first


def _place(run: RankRun, wanted: Reference, step: int, request: int, token: int, tolerance: float) -> str:
    """The first decoder layer whose output for this token is wrong."""
    for layer, values in enumerate(wanted.layers[step]):
        gap = np.abs(run.layers[step][layer, request, token] - values[token])
        if not (gap <= tolerance * max(1.0, float(np.abs(values[token]).max()))).all():
            return f"first wrong after layer {layer}"
    return "right after the last layer, wrong after the head"


def as_json(result: CellResult) -> dict[str, Any]:
    """The public form: ``{"equal", "compared", "max_abs_difference", "first_mismatch"}``."""
    return {
        "equal": result.equal,
        "compared": result.compared,
        "max_abs_difference": result.max_abs_difference,
        "first_mismatch": result.first_mismatch,
    }
