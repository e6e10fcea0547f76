"""Steady states of an instance with pipeline stages: the maths of :mod:`.steady_state` on the flow of batches.

With one stage and one batch in flight each function gives what the grid's own ``solve`` gives.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving_cast.service.steady_state import (
    AggregatedGrid,
    ContextGather,
    DecodeGrid,
    PrefillGrid,
    SteadyState,
    StepPricer,
)
from tensor_cast.ir.expr import Num
from tensor_cast.ir.record import Scope
from tensor_cast.performance_model.pipeline import Flow, StageTimes, mixed_flow, prefill_seconds, steady_flow

__all__ = ["Pipe", "StagedPricer", "solve_staged"]

Array = NDArray[np.float64]
Env = Mapping[str, Num]


@dataclass(frozen=True)
class StagedPricer:
    """Prices one phase's step stage by stage.

    Args:
        work: what each stage computes.
        wire: what each stage receives (scope ``TOKEN``) and, on the last, what goes back (scope ``SAMPLE``).
    """

    work: tuple[StepPricer, ...]
    wire: tuple[StepPricer, ...]

    def hops(self, env: Env) -> tuple[Num, ...]:
        """Seconds of the transfer into each stage."""
        return tuple(pricer.seconds(env, (Scope.TOKEN,))[Scope.TOKEN] for pricer in self.wire)

    def back(self, env: Env) -> Num:
        """Seconds until the sampled tokens are on the first stage."""
        return self.wire[-1].seconds(env, (Scope.SAMPLE,))[Scope.SAMPLE]

    def stages(self, env: Env, scopes: Collection[Scope] = tuple(Scope)) -> tuple[Num, ...]:
        """Seconds that each stage computes, over ``scopes``."""
        return tuple(sum(pricer.seconds(env, scopes).values()) for pricer in self.work)


@dataclass(frozen=True)
class Pipe:
    """A pipeline as the serving maths sees it.

    Args:
        batches: in flight.
        host_s: host time of a step that nothing hides while its batch waits for it.
        overlap: see :class:`tensor_cast.performance_model.pipeline.StageTimes`.
        gather: per stage, what prefill chunks add under DCP.
    """

    decode: StagedPricer | None
    prefill: StagedPricer | None
    batches: int
    host_s: float
    overlap: bool = False
    gather: tuple[ContextGather, ...] | None = None

    def times(self, grid: DecodeGrid | PrefillGrid) -> StageTimes:
        """Stage times of the grid's step."""
        pricer = self.decode if isinstance(grid, DecodeGrid) else self.prefill
        assert pricer is not None
        return StageTimes(
            pricer.stages(grid.env), pricer.hops(grid.env), pricer.back(grid.env) + self.host_s, self.overlap
        )

    def calm_times(self, grid: AggregatedGrid) -> StageTimes:
        """Stage times of a step of decodes alone."""
        assert self.decode is not None
        env = grid.decode_env
        return StageTimes(
            self.decode.stages(env), self.decode.hops(env), self.decode.back(env) + self.host_s, self.overlap
        )

    def busy_times(self, grid: AggregatedGrid) -> StageTimes:
        """Stage times of a step of decodes with chunks of prompts."""
        assert self.decode is not None
        assert self.prefill is not None
        parts = zip(
            self.decode.stages(grid.mixed_env, (Scope.TOKEN,)),
            self.decode.stages(grid.sample_env, (Scope.SAMPLE,)),
            self.decode.stages(grid.decode_env, (Scope.SEQUENCE,)),
            self.prefill.stages(grid.prefill_env, (Scope.SEQUENCE,)),
            strict=True,
        )
        work = [token + sample + attention + prompt for token, sample, attention, prompt in parts]
        if self.gather is not None:
            context = grid.context_before()
            added = [gather(grid.prompts, grid.chunk, *context) for gather in self.gather]
            work = [seconds + more for seconds, more in zip(work, added, strict=True)]
        env = grid.mixed_env
        back = self.decode.back(grid.sample_env) + self.host_s
        return StageTimes(tuple(work), self.decode.hops(env), back, self.overlap)


def solve_staged(grid: AggregatedGrid | DecodeGrid | PrefillGrid, pipe: Pipe) -> tuple[SteadyState, Flow]:
    """State of one DP rank, all batches in flight together, and the flow that it comes from."""
    if isinstance(grid, DecodeGrid):
        return _decode(grid, pipe)
    if isinstance(grid, PrefillGrid):
        return _prefill(grid, pipe)
    return _aggregated(grid, pipe)


def _decode(grid: DecodeGrid, pipe: Pipe) -> tuple[SteadyState, Flow]:
    w = grid.workload
    flow = steady_flow(pipe.times(grid), pipe.batches)
    cycle = _like(flow.cycle, grid.batches)
    tokens = pipe.batches * grid.batches * w.tokens_per_step / cycle
    state = SteadyState(
        step=cycle,
        tpot=cycle / w.tokens_per_step,
        tokens_per_second=tokens,
        requests_per_second=tokens / max(1, w.output_length - 1),
        step_tokens=grid.batches * w.query_length,
        budget=grid.budget,
        within_budget=grid.batches * w.query_length <= grid.budget,
    )
    return state, flow


def _prefill(grid: PrefillGrid, pipe: Pipe) -> tuple[SteadyState, Flow]:
    w = grid.workload
    times = pipe.times(grid)
    flow = steady_flow(times, pipe.batches)
    ttft, between = prefill_seconds(times, grid.chunks, pipe.batches)
    rate = grid.batches / _like(between, grid.batches)
    state = SteadyState(
        step=_like(flow.cycle, grid.batches),
        ttft=_like(ttft, grid.batches),
        requests_per_second=rate,
        tokens_per_second=rate * w.input_length,
        step_tokens=grid.batches * float(grid.env["Q"]),
        budget=grid.budget,
        within_budget=(grid.batches * w.new_input_tokens <= grid.budget) | (grid.batches == 1),
    )
    return state, flow


def _aggregated(grid: AggregatedGrid, pipe: Pipe) -> tuple[SteadyState, Flow]:
    """As without stages, per batch in flight; a prompt's chunks follow each other slot by slot, whatever batch is due.

    TTFT adds the time in which the last chunk passes the stages behind the slowest one.
    """
    w, m = grid.workload, pipe.batches
    calm, busy = pipe.calm_times(grid), pipe.busy_times(grid)
    flow = mixed_flow(calm, busy, grid.share, m)
    cycle = _like(flow.cycle, grid.batches)
    # Between the starts of two steps on the first stage, by kind of step.
    short, long = np.maximum(calm.slot, calm.latency / m), np.maximum(busy.slot, busy.latency / m)
    mean = (1.0 - grid.share) * short + grid.share * long
    running = ((1.0 - grid.share) * short**2 + grid.share * long**2) / (2.0 * mean)
    u = grid.utilisation
    room = grid.budget - grid.batches * w.query_length
    backlog = u / (2.0 * (1.0 - u)) * w.new_input_tokens / np.where(grid.within_budget, room, 1.0)
    ttft = running + (backlog + grid.chunks_per_prompt) * long + (m - 1) * long
    tokens = m * grid.batches * w.tokens_per_step / cycle
    state = SteadyState(
        step=cycle,
        tpot=cycle / w.tokens_per_step,
        ttft=_like(ttft, grid.batches),
        tokens_per_second=tokens,
        requests_per_second=tokens / w.output_length,
        step_tokens=grid.batches * w.query_length + grid.arrivals * w.new_input_tokens,
        budget=grid.budget,
        within_budget=grid.within_budget,
    )
    return state, flow


def _like(values: Any, batches: Array) -> Array:
    """One entry per batch size."""
    return np.broadcast_to(np.asarray(values, dtype=np.float64), batches.shape)
