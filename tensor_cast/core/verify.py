"""Proving one model on one layout: the door to :mod:`tensor_cast.proof`. Torch is imported when something runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tensor_cast.core.user_config import UserInputConfig
from tensor_cast.errors import MsModelingError, UnsupportedModelError
from tensor_cast.ir.record import Phase
from tensor_cast.model_catalog import describe, load_model_config
from tensor_cast.model_config import ModelConfig, ParallelConfig
from tensor_cast.proof.shrink import Shrunk, shrink
from tensor_cast.proof.small_layout import MAX_RANKS
from tensor_cast.proof.telling import Telling, telling_layouts
from tensor_cast.quant import QuantConfig

if TYPE_CHECKING:
    from tensor_cast.proof.cell import Cell

__all__ = ["DTYPES", "PlannedLayout", "Verification", "VerifiedLayout", "VerifiedRun", "layout_label", "plan", "verify"]

#: Types that a proof runs in.
DTYPES = ("float64", "float32")
#: Tokens to verify in a step where none are asked for.
_DEFAULT_DRAFTS = 2
#: Ranks of each layout where none is asked for.
_TELLING_RANKS = 4


@dataclass(frozen=True)
class PlannedLayout:
    """A layout to prove and what stands for it.

    Args:
        asked: the layout of the whole model, and what is special about it.
        small: the small model and the layout it runs on.
    """

    asked: Telling
    small: Shrunk

    def to_json(self) -> dict[str, Any]:
        """The public form."""
        return {
            "what": self.asked.what,
            "layout": layout_label(self.asked.parallel, self.asked.dcp_semantics),
            "ran_as": layout_label(self.small.parallel, self.asked.dcp_semantics),
            "block_size": self.small.block_size,
            "shrunk": {c.field: {"from": c.before, "to": c.after} for c in self.small.changes},
        }


@dataclass(frozen=True)
class VerifiedRun:
    """One run: prompts and decode steps of several requests.

    Args:
        query: tokens of each request in a decode step.
        prompt: how the prompt got into the cache: ``whole``, or in ``chunks``.
        equal: whether logits and sampled tokens are those of Transformers, and the executed ops those of the trace.
        compared: logits compared.
        max_abs_difference: the largest difference of two logits, NaN if one was not a number.
        first_mismatch: the first thing that is wrong, in a sentence, or None.
        traced_ops: executed ops that were compared with the symbolic trace.
    """

    query: int
    prompt: str
    equal: bool
    compared: int
    max_abs_difference: float
    first_mismatch: str | None
    traced_ops: int

    def to_json(self) -> dict[str, Any]:
        """The public form."""
        return {
            "query_len": self.query,
            "prompt": self.prompt,
            "equal": self.equal,
            "compared": self.compared,
            "max_abs_difference": _number(self.max_abs_difference),
            "first_mismatch": self.first_mismatch,
            "traced_ops": self.traced_ops,
        }


@dataclass(frozen=True)
class VerifiedLayout:
    """A layout with the runs that were made on it."""

    planned: PlannedLayout
    runs: tuple[VerifiedRun, ...]

    @property
    def equal(self) -> bool:
        """Whether every run is."""
        return all(run.equal for run in self.runs)

    @property
    def compared(self) -> int:
        """Logits compared."""
        return sum(run.compared for run in self.runs)

    @property
    def max_abs_difference(self) -> float:
        """The largest difference, NaN if a logit was not a number."""
        return _largest(run.max_abs_difference for run in self.runs)

    @property
    def first_mismatch(self) -> str | None:
        """The first thing that is wrong, or None."""
        wrong = (f"query length {run.query}, {run.first_mismatch}" for run in self.runs if not run.equal)
        return next(wrong, None)

    def to_json(self) -> dict[str, Any]:
        """The public form."""
        return {
            **self.planned.to_json(),
            "equal": self.equal,
            "compared": self.compared,
            "max_abs_difference": _number(self.max_abs_difference),
            "first_mismatch": self.first_mismatch,
            "runs": [run.to_json() for run in self.runs],
        }


@dataclass(frozen=True)
class Verification:
    """Outcome over all layouts.

    Args:
        model_id: the model.
        dtype: what both sides ran in.
        tolerance: largest difference of two logits that counts as equal.
        layouts: one entry each.
    """

    model_id: str
    dtype: str
    tolerance: float
    layouts: tuple[VerifiedLayout, ...]

    @property
    def equal(self) -> bool:
        """Whether every layout is."""
        return all(layout.equal for layout in self.layouts)

    @property
    def compared(self) -> int:
        """Logits compared."""
        return sum(layout.compared for layout in self.layouts)

    @property
    def max_abs_difference(self) -> float:
        """The largest difference, NaN if a logit was not a number."""
        return _largest(layout.max_abs_difference for layout in self.layouts)

    @property
    def first_mismatch(self) -> str | None:
        """The first thing that is wrong, or None."""
        for layout in self.layouts:
            if not layout.equal:
                small, asked = layout.planned.small, layout.planned.asked
                return f"{layout_label(small.parallel, asked.dcp_semantics)}: {layout.first_mismatch}"
        return None

    def to_json(self) -> dict[str, Any]:
        """``{"equal", "compared", "max_abs_difference", "first_mismatch", ...}``; not a number is null."""
        return {
            "equal": self.equal,
            "compared": self.compared,
            "max_abs_difference": _number(self.max_abs_difference),
            "first_mismatch": self.first_mismatch,
            "tolerance": self.tolerance,
            "dtype": self.dtype,
            "model": self.model_id,
            "layouts": [layout.to_json() for layout in self.layouts],
        }


def layout_label(parallel: ParallelConfig, dcp_semantics: str) -> str:
    """``tp4 dp2 ep8 dcp2 (vllm, interleave 1)``; sizes of 1 are left out, ``one rank`` if all are."""
    sizes = {
        "tp": parallel.tensor_parallel_size,
        "dp": parallel.data_parallel_size,
        "ep": parallel.expert_parallel_size,
        "moe_dp": parallel.moe_data_parallel_size,
        "dcp": parallel.decode_context_parallel_size,
    }
    words = [f"{axis}{size}" for axis, size in sizes.items() if size > 1]
    if parallel.decode_context_parallel_size > 1:
        words.append(f"({dcp_semantics}, interleave {parallel.cp_kv_cache_interleave_size})")
    return " ".join(words) or "one rank"


def plan(config: UserInputConfig) -> tuple[PlannedLayout, ...]:
    """What :func:`verify` would run; needs no torch.

    Args:
        config: model and layout. With every size at 1 it is a few layouts that tell most; ``dcp_semantics`` then limits
            the readings of DCP, and every one is tried if it is None.

    Raises:
        ConfigError, LegalityError, UnsupportedModelError: see :mod:`tensor_cast.errors`.
    """
    model = load_model_config(config.model)
    config = config.model_copy(update={"phase": Phase.DECODE})
    quant = QuantConfig.resolve(model, config.quantize_linear_action, config.quantize_attention_action)
    parallel = config.check(model, quant)
    block = config.get_block_size(model)
    if parallel.world_size > 1:
        asked = Telling("as asked", parallel, config.get_dcp_semantics())
        return (PlannedLayout(asked, shrink(model, parallel, block_size=block, max_ranks=MAX_RANKS)),)
    layouts = telling_layouts(
        model,
        block_size=block,
        dcp_semantics=config.dcp_semantics,
        interleave=config.cp_kv_cache_interleave_size,
        quant_block=quant.block,
        num_mtp_tokens=config.num_mtp_tokens,
    )
    return tuple(
        PlannedLayout(asked, shrink(model, asked.parallel, block_size=block, max_ranks=_TELLING_RANKS))
        for asked in layouts
    )


def verify(
    config: UserInputConfig,
    *,
    seed: int = 0,
    dtype: str = "float64",
    progress: Callable[[str], None] = lambda line: None,
) -> Verification:
    """Run a small model of the same kind on several ranks and compare it with Transformers' own.

    Args:
        config: model and layout, see :func:`plan`.
        seed: of weights, tokens and the order of pages.
        dtype: one of :data:`DTYPES`.
        progress: called with a line before each run.

    Raises:
        ConfigError, LegalityError, UnsupportedModelError: see :mod:`tensor_cast.errors`.
    """
    planned = plan(config)
    # Everything from here on needs torch.
    from tensor_cast.proof import compare
    from tensor_cast.proof.launch import shared_pool

    double = dtype == "float64"
    _check_cuts(planned)
    shared_pool(max(layout.small.parallel.world_size for layout in planned))  # one for all layouts
    outcomes = []
    for layout in planned:
        model = layout.small.model if double else _with_dtype(layout.small.model, dtype)
        runs = []
        for cell in _cells(layout, config.num_mtp_tokens or _DEFAULT_DRAFTS):
            label = layout_label(layout.small.parallel, layout.asked.dcp_semantics)
            progress(f"{layout.asked.what}: {label}, query length {cell.query}, prompt {_prompt(cell)}")
            runs.append(_run(model, cell, seed, double))
        outcomes.append(VerifiedLayout(layout, tuple(runs)))
    tolerance = compare.TOLERANCE if double else compare.TOLERANCE_FLOAT32
    return Verification(planned[0].small.model.model_id, dtype, tolerance, tuple(outcomes))


def _run(model: ModelConfig, cell: Cell, seed: int, double: bool) -> VerifiedRun:
    from tensor_cast.proof import compare
    from tensor_cast.proof.launch import RankError

    try:
        result = compare.run_cell(model, cell, seed=seed, double=double)
    except RankError as error:
        # A program that is cut wrongly may as well not run at all.
        lines = str(error).strip().splitlines()
        return VerifiedRun(cell.query, _prompt(cell), False, 0, math.nan, f"{lines[0]} {lines[-1]}", 0)
    return VerifiedRun(
        query=cell.query,
        prompt=_prompt(cell),
        equal=result.equal and result.trace_difference is None,
        compared=result.compared,
        max_abs_difference=result.max_abs_difference,
        first_mismatch=_mismatch(result.first_mismatch, result.trace_difference),
        traced_ops=result.recorded,
    )


def _mismatch(logits: str | None, trace: str | None) -> str | None:
    return logits if trace is None or logits is not None else f"executed ops are not those of the trace: {trace}"


def _cells(layout: PlannedLayout, drafts: int) -> tuple[Cell, ...]:
    """Runs of one layout: one token and several to a step; with a split context also the prompt in chunks."""
    from tensor_cast.proof.cell import Cell

    parallel = layout.small.parallel
    cell = Cell(
        tp=parallel.tensor_parallel_size,
        dp=parallel.data_parallel_size,
        ep=parallel.expert_parallel_size,
        moe_dp=parallel.moe_data_parallel_size,
        dcp=parallel.decode_context_parallel_size,
        semantics=layout.asked.dcp_semantics,
        interleave=parallel.cp_kv_cache_interleave_size,
        block_size=layout.small.block_size,
    )
    cells = (cell, replace(cell, query=1 + drafts))
    return (*cells, replace(cell, prefill="chunks")) if cell.dcp > 1 else cells


def _prompt(cell: Cell) -> str:
    return "chunks" if cell.dcp > 1 and cell.prefill == "chunks" else "whole"


def _check_cuts(planned: tuple[PlannedLayout, ...]) -> None:
    """Build and cut here first, where what cannot be done is one clear sentence, and not in a rank.

    Raises:
        UnsupportedModelError, LegalityError, ConfigError: see :mod:`tensor_cast.errors`.
    """
    from tensor_cast.layers.program import Anatomy
    from tensor_cast.tracer.builder import build, one_line

    built: dict[ModelConfig, Anatomy] = {}
    for layout in planned:
        model = layout.small.model
        try:
            if model not in built:
                built[model] = Anatomy(build(model))
            built[model].cut(_cells(layout, 0)[0].context)
        except MsModelingError:
            raise
        except Exception as error:
            # The same courtesy as tracing has: a class that we do not understand is not a fault of the user's.
            raise UnsupportedModelError(
                f"{model.model_id} ({model.model_type}) cannot be run: {one_line(error)}"
            ) from error


def _with_dtype(model: ModelConfig, dtype: str) -> ModelConfig:
    config = {k: v for k, v in json.loads(model.hf_config).items() if k != "torch_dtype"}
    return describe({**config, "dtype": dtype}, model.model_id, model.model_id)


def _largest(values: Any) -> float:
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
