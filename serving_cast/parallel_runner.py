"""Every layout, checked, priced and searched: from a question to one summary per device and set of limits."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving_cast.config import Limits, Mode, OptimizerConfig, ParallelConfig
from serving_cast.service.layout_costs import CostsFactory, Grid, LayoutCosts, TracedCostsFactory
from serving_cast.service.layout_sizes import broken_rules, layout_sizes
from serving_cast.service.optimizer_summary import FailedSummary, OptimizerSummary, Summary
from serving_cast.service.pareto import pareto_rows
from serving_cast.service.pd_ratio import best_ratio, transfer_seconds
from serving_cast.service.points import LayoutMemory, LayoutPoints, PipelineView, StagedMemory
from serving_cast.service.remedies import advise
from serving_cast.service.rows import Rejection, Row
from serving_cast.service.search import choose, merit, nearest
from serving_cast.service.staged_costs import StagedCosts
from serving_cast.service.staged_state import solve_staged
from serving_cast.service.steady_state import GRIDS, AggregatedGrid, DecodeGrid, SteadyState
from serving_cast.setting import Setting, make_setting
from tensor_cast.engine.kv_cache import indexer_layers
from tensor_cast.errors import LegalityError, MsModelingError
from tensor_cast.ir.record import Phase
from tensor_cast.pipeline_partition import (
    AUTO,
    Partition,
    default_partition,
    layer_equivalents,
    parse_partition,
    refuse_unsafe,
)

__all__ = ["Evaluation", "ParallelRunner", "run_devices"]

#: Called with (layouts done, layouts in all).
Progress = Callable[[int, int], None]

_AGGREGATED = "aggregated"
_PHASES: dict[str, tuple[Phase, ...]] = {
    _AGGREGATED: (Phase.DECODE, Phase.PREFILL),
    "prefill": (Phase.PREFILL,),
    # Prefill as well: the engine sizes its pool after a profile run with a full budget of prompt tokens.
    "decode": (Phase.DECODE, Phase.PREFILL),
}


@dataclass(frozen=True)
class Evaluation:
    """All points of one device, before any limit; ``rejections`` are the layouts that never were priced."""

    points: tuple[LayoutPoints, ...]
    rejections: tuple[Rejection, ...]


class ParallelRunner:
    """Searches one device.

    Args:
        setting: everything that does not depend on the layout.
        costs: where prices come from; by default traces of the model.
        progress: told how many layouts are done.
    """

    def __init__(
        self, setting: Setting, *, costs: CostsFactory | None = None, progress: Progress | None = None
    ) -> None:
        self.setting = setting
        self.config = setting.config
        self._costs: CostsFactory = costs or TracedCostsFactory(setting)
        self._progress = progress or (lambda done, total: None)

    # -- layouts ------------------------------------------------------------------------------------------------
    def _sized(self, sizes: Mapping[str, Any]) -> ParallelConfig:
        return ParallelConfig(**sizes, cp_kv_cache_interleave_size=self.setting.interleave)

    def _get_user_config(self, phase: Phase, **sizes: int) -> ParallelConfig:
        """The layout of one phase. Prefill runs with dcp = 1, whatever is asked for decode.

        Every rule is checked before a layout is built from the sizes for tracing or pricing.

        ``sizes`` are fields of :class:`ParallelConfig`: ``tp_size``, ``dp_size``, ``dcp_size`` ...

        Raises:
            LegalityError: the first rule that the sizes break.
        """
        if phase is Phase.PREFILL:
            sizes = {**sizes, "dcp_size": 1}
        parallel = self._sized(sizes)
        if broken := broken_rules(self.setting, parallel, phase):
            raise broken[0]
        return replace(parallel, pp_layer_partition=self._partition(parallel.pp_size))

    def _partition(self, stages: int) -> Partition:
        """The layers of each stage; empty without stages, or where the best is yet to be chosen.

        Raises:
            LegalityError: what the user gave does not fit, or leaves layers without the top-k indices they reuse.
        """
        asked, model = self.config.pp_layer_partition, self.setting.model
        if stages == 1 or asked == AUTO:
            return ()
        layers = model.num_hidden_layers
        partition = default_partition(layers, stages) if asked is None else parse_partition(asked, layers, stages)
        refuse_unsafe(partition, indexer_layers(model), self.config.dsa_split)
        return partition

    def _legal(self, phase: str) -> tuple[list[ParallelConfig], list[Rejection]]:
        """Layouts of one serving phase that break no rule, and what the others break."""
        legal: dict[ParallelConfig, None] = {}
        rejections: dict[ParallelConfig, Rejection] = {}
        wanted = {
            "prefill": self.config.prefill_devices_per_instance,
            "decode": self.config.decode_devices_per_instance,
        }
        size = wanted.get(phase) if self.config.mode is Mode.PD_RATIO else None
        for sizes in layout_sizes(self.setting):
            if phase == "prefill":
                sizes = {**sizes, "dcp_size": 1}
            asked = self._sized(sizes)
            if size not in (None, asked.world_size) or asked in legal or asked in rejections:
                continue
            try:
                for step in (Phase.PREFILL,) if phase == "prefill" else (Phase.DECODE, Phase.PREFILL):
                    found = self._get_user_config(step, **sizes)
            except LegalityError as error:
                rejections[asked] = Rejection(asked, phase, error.rule, error.need, error.have, error.remedy)
            else:
                legal[replace(asked, pp_layer_partition=found.pp_layer_partition)] = None
        return list(legal), list(rejections.values())

    # -- points -------------------------------------------------------------------------------------------------
    def evaluate(self) -> Evaluation:
        """Price every legal layout at every batch size."""
        phases = (_AGGREGATED,) if self.config.mode is Mode.AGGREGATED else ("prefill", "decode")
        legal: list[tuple[str, ParallelConfig]] = []
        rejections: list[Rejection] = []
        for phase in phases:
            found, refused = self._legal(phase)
            legal += [(phase, parallel) for parallel in found]
            rejections += refused
        self._costs.prepare([(parallel, _PHASES[phase]) for phase, parallel in legal])
        grids = {phase: self._grid(phase) for phase in phases}
        points: list[LayoutPoints] = []
        for done, (phase, parallel) in enumerate(legal):
            self._progress(done, len(legal))
            splits = self._splits(phase, parallel, grids[phase][1])
            points += [self._points(phase, split, *grids[phase]) for split in splits]
        self._progress(len(legal), len(legal))
        return Evaluation(tuple(points), tuple(rejections))

    def _splits(self, phase: str, parallel: ParallelConfig, grid: Grid) -> list[ParallelConfig]:
        """The layout itself, or with every partition that may be the best."""
        if parallel.pp_size == 1 or parallel.pp_layer_partition:
            return [parallel]
        found = self._costs.partitions(parallel, _PHASES[phase], grid)
        return [replace(parallel, pp_layer_partition=partition) for partition in found]

    def _grid(self, phase: str) -> tuple[NDArray[np.int64], Grid]:
        """Batch sizes of a phase: all that the token budget, the engine and the user allow."""
        s, workload = self.setting, self.setting.workload
        # The user's range is one of decodes; prompts of a prefill instance are bounded by the token budget.
        asked = None if phase == "prefill" else self.config.space.batch_range
        low, high = asked or (1, s.budget)
        per_request = workload.new_input_tokens if phase == "prefill" else workload.query_length
        most = self.config.max_concurrency or high
        high = min(high, int(s.budget // per_request), s.max_num_seqs or high, most)
        batches = np.arange(low, max(low, high) + 1, dtype=np.int64)
        return batches, GRIDS[phase](workload, s.budget, batches.astype(np.float64))

    def _points(
        self,
        phase: str,
        parallel: ParallelConfig,
        batches: NDArray[np.int64],
        grid: Grid,
    ) -> LayoutPoints:
        costs = self._costs.costs(parallel, _PHASES[phase])
        w = self.setting.workload
        memory: LayoutMemory | StagedMemory
        pipeline = None
        if isinstance(costs, StagedCosts):
            state, flow = solve_staged(grid, costs.pipe)
            pipeline = PipelineView(
                costs.batches_in_flight,
                flow,
                parallel.pp_layer_partition,
                layer_equivalents(parallel.pp_layer_partition, w.num_mtp_tokens),
                costs.handover,
            )
            resident = costs.resident_batches(grid)
            memory = StagedMemory(tuple(self._memory(stage, grid, resident) for stage in costs.stages))
            prompt = max(stage.kv_bytes(w.input_length) for stage in costs.stages)
        else:
            state = _solve(grid, costs)
            memory = self._memory(costs, grid)
            prompt = costs.kv_bytes(w.input_length)
        return LayoutPoints(
            phase=phase,
            parallel=parallel,
            labels=self.setting.labels,
            num_devices=self.config.num_devices,
            replicas=self.config.num_devices // parallel.world_size,
            batches=batches,
            state=state,
            memory=memory,
            prompt_kv_bytes=prompt,
            coverage=costs.coverage,
            bound_of=lambda index: costs.bound(grid, index),
            pipeline=pipeline,
            max_concurrency=self.config.max_concurrency,
            advice=partial(advise, self.setting, parallel, phase),
        )

    def _memory(self, costs: LayoutCosts, grid: Grid, batches: float = 1.0) -> LayoutMemory:
        """Memory of one rank with the KV of ``batches`` batches; only one of them runs at a time."""
        return LayoutMemory(
            available=self.setting.available_bytes,
            weights=costs.weight_bytes,
            overhead=costs.overhead_bytes,
            activation=costs.activation_bytes(grid),
            kv=costs.pool_bytes(grid, batches),
            longest=costs.longest_bytes if self.config.max_model_len else 0,
        )

    # -- answers ------------------------------------------------------------------------------------------------
    def run(self) -> list[OptimizerSummary]:
        """One summary for each set of limits."""
        evaluation = self.evaluate()
        return [self.summarise(evaluation, limits) for limits in self.config.limits]

    def summarise(self, evaluation: Evaluation, limits: Limits) -> OptimizerSummary:
        """The answer under ``limits``."""
        rows: list[Row] = []
        rejections = list(evaluation.rejections)
        for partitions in _by_layout(evaluation.points):
            found = [(points, choose(points, limits)) for points in partitions]
            good = [points.row(index) for points, index in found if not isinstance(index, Rejection)]
            if good:
                rows.append(min(good, key=merit))
            else:
                missed = nearest(index for _, index in found if isinstance(index, Rejection))
                assert missed is not None
                rejections.append(missed)
        rows.sort(key=lambda row: (row.phase != "prefill", *merit(row)))
        choice = None
        if self.config.mode is Mode.PD_RATIO:
            choice = best_ratio(
                [p for p in evaluation.points if p.phase == "prefill"],
                [p for p in evaluation.points if p.phase == "decode"],
                limits,
                num_devices=self.config.num_devices,
                output_length=self.config.workload.output_length,
                transfer=self._transfer_seconds,
            )
        return OptimizerSummary(
            setting=self.setting,
            limits=limits,
            candidates=tuple(rows),
            pareto=tuple(pareto_rows(evaluation.points, limits)),
            rejections=tuple(rejections),
            choice=choice,
        )

    def _transfer_seconds(self, prefill: LayoutPoints, decode: LayoutPoints) -> float:
        """Time to move a whole prompt's KV; the outermost tier is what connects instances."""
        tier = self.setting.device.tiers[-1]
        moving = transfer_seconds(
            decode.prompt_kv_bytes,
            prefill_tp=prefill.parallel.tp_size,
            decode_tp=decode.parallel.tp_size,
            bandwidth=tier.bandwidth.value,
        )
        return moving + tier.latency_s


def _by_layout(points: tuple[LayoutPoints, ...]) -> list[list[LayoutPoints]]:
    """Points that differ only in their partition together; order of first appearance."""
    groups: dict[tuple[str, ParallelConfig], list[LayoutPoints]] = {}
    for p in points:
        groups.setdefault((p.phase, replace(p.parallel, pp_layer_partition=())), []).append(p)
    return list(groups.values())


def _solve(grid: Grid, costs: LayoutCosts) -> SteadyState:
    if isinstance(grid, AggregatedGrid):
        assert costs.decode is not None
        assert costs.prefill is not None
        return grid.solve(costs.decode, costs.prefill, costs.host_s, costs.gather)
    pricer = costs.decode if isinstance(grid, DecodeGrid) else costs.prefill
    assert pricer is not None
    return grid.solve(pricer, costs.host_s)


def run_devices(config: OptimizerConfig, progress: Progress | None = None) -> list[Summary]:
    """Every device of ``config`` in turn; with ``jobs`` > 1 those after the first in processes of their own.

    The first one fills the trace cache. Workers are forked, which is safe only while no tracing (torch and its threads)
    has run in this process: the result is the same either way.
    """
    found = [_answer(config, config.devices[0], progress)]
    rest = config.devices[1:]
    if config.jobs > 1 and len(rest) > 1 and "torch" not in sys.modules and hasattr(os, "fork"):
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import get_context

        with ProcessPoolExecutor(min(config.jobs, len(rest)), mp_context=get_context("fork")) as pool:
            found += pool.map(_answer, repeat(config), rest)
    else:
        found += [_answer(config, device, progress) for device in rest]
    errors = [answer for answer in found if isinstance(answer, MsModelingError)]
    if len(errors) == len(found):
        raise errors[0]
    return [
        summary
        for device, answer in zip(config.devices, found, strict=True)
        for summary in (
            [FailedSummary(config, device, limits, str(answer)) for limits in config.limits]
            if isinstance(answer, MsModelingError)
            else answer
        )
    ]


def _answer(
    config: OptimizerConfig, device: str, progress: Progress | None = None
) -> list[OptimizerSummary] | MsModelingError:
    """The summaries of one device, or what keeps it from running the model at all."""
    try:
        return ParallelRunner(make_setting(config, device), progress=progress).run()
    except MsModelingError as error:
        return error
