"""Proving one model on one layout: the door to :mod:`tensor_cast.proof`. Torch is imported when something runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

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

    @property
    def ran_as(self) -> str:
        """Label of the layout that is run."""
        return layout_label(self.small.parallel, self.asked.dcp_semantics)

    def to_json(self) -> dict[str, Any]:
        """The public form."""
        return {
            "what": self.asked.what,
            "layout": layout_label(self.asked.parallel, self.asked.dcp_semantics),
            "ran_as": self.ran_as,
            "block_size": self.small.block_size,
            "shrunk": {c.field: {"from": c.before, "to": c.after} for c in self.small.changes},
        }


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a comparison with Transformers gave.

    Args:
        equal: whether logits and sampled tokens are those of Transformers, and the executed ops those of the trace.
        compared: logits compared.
        max_abs_difference: the largest difference of two logits, NaN if one was not a number.
        first_mismatch: the first thing that is wrong, in a sentence, or None.
    """

    equal: bool
    compared: int
    max_abs_difference: float
    first_mismatch: str | None

    @classmethod
    def together(cls, parts: Sequence[tuple[str, Outcome]], **others: Any) -> Self:
        """Several outcomes as one.

        Args:
            parts: how a sentence about an outcome begins, and the outcome.
            others: the fields that a class adds to these.
        """
        found = [part.max_abs_difference for _, part in parts]
        return cls(
            equal=all(part.equal for _, part in parts),
            compared=sum(part.compared for _, part in parts),
            max_abs_difference=math.nan if any(map(math.isnan, found)) else max(found, default=0.0),
            first_mismatch=next((f"{b}{part.first_mismatch}" for b, part in parts if not part.equal), None),
            **others,
        )

    def verdict(self) -> dict[str, Any]:
        """The public form of these four; a difference that is not a number is null."""
        difference = self.max_abs_difference
        return {
            "equal": self.equal,
            "compared": self.compared,
            "max_abs_difference": difference if math.isfinite(difference) else None,
            "first_mismatch": self.first_mismatch,
        }


@dataclass(frozen=True, kw_only=True)
class VerifiedRun(Outcome):
    """One run: prompts and decode steps of several requests.

    Args:
        query: tokens of each request in a decode step.
        prompt: how the prompt got into the cache: ``whole``, or in ``chunks``.
        traced_ops: executed ops that were compared with the symbolic trace.
    """

    query: int
    prompt: str
    traced_ops: int

    def to_json(self) -> dict[str, Any]:
        """The public form."""
        return {"query_len": self.query, "prompt": self.prompt, **self.verdict(), "traced_ops": self.traced_ops}


@dataclass(frozen=True, kw_only=True)
class VerifiedLayout(Outcome):
    """A layout with the runs that were made on it."""

    planned: PlannedLayout
    runs: tuple[VerifiedRun, ...]

    def to_json(self) -> dict[str, Any]:
        """The public form."""
        return {**self.planned.to_json(), **self.verdict(), "runs": [run.to_json() for run in self.runs]}


@dataclass(frozen=True, kw_only=True)
class Verification(Outcome):
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

    def to_json(self) -> dict[str, Any]:
        """:meth:`verdict` over everything, and the same for each layout and run."""
        return {
            **self.verdict(),
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
            progress(f"{layout.asked.what}: {layout.ran_as}, query length {cell.query}, prompt {_prompt(cell)}")
            runs.append(_run(model, cell, seed, double))
        named_runs = [(f"query length {run.query}, ", run) for run in runs]
        outcomes.append(VerifiedLayout.together(named_runs, planned=layout, runs=tuple(runs)))
    return Verification.together(
        [(f"{outcome.planned.ran_as}: ", outcome) for outcome in outcomes],
        model_id=planned[0].small.model.model_id,
        dtype=dtype,
        tolerance=compare.TOLERANCE if double else compare.TOLERANCE_FLOAT32,
        layouts=tuple(outcomes),
    )


def _run(model: ModelConfig, cell: Cell, seed: int, double: bool) -> VerifiedRun:
    from tensor_cast.proof import compare
    from tensor_cast.proof.launch import RankError

    try:
        result = compare.run_cell(model, cell, seed=seed, double=double)
    except RankError as error:
        # A program that is cut wrongly may as well not run at all.
        lines = str(error).strip().splitlines()
        return VerifiedRun(
            equal=False,
            compared=0,
            max_abs_difference=math.nan,
            first_mismatch=f"{lines[0]} {lines[-1]}",
            query=cell.query,
            prompt=_prompt(cell),
            traced_ops=0,
        )
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
