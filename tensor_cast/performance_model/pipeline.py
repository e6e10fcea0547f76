"""How batches flow through pipeline stages: cycle times, TPOT, utilisation, and where the idle time comes from.

Each request belongs to one of ``m`` batches. A batch visits the stages in order; its next step starts when its last
tokens have come back from the last stage. A stage serves one batch at a time, in a fixed order. Therefore a batch needs

    cycle = max(latency, m * slot)

from step to step: ``latency`` is its own way through all stages and back, ``slot`` the time that the slowest stage is
taken by one batch, and m batches queue there. With m batches in flight, m tokens' worth of requests finish a step each
cycle. One batch leaves a stage busy 1/p of the time at best; p equal stages with p batches keep each busy but for what
transfers and the host add. The transfer into a stage occupies the receiver, which waits for it, unless the engine
overlaps it with other work.

Steps are not alike where some carry a prompt's chunk. Batches keep their order, so a long step holds up those behind it
at every stage: for equal stages the slot is taken to be the longest of any p steps in a row, a *variation* bubble. For
p = m = 2 that is exact; for more stages it is up to a tenth too long (the test plays schedules through).

Idle time of the stages has these causes: ``imbalance`` (stages of different speed), ``p2p`` (waiting for transfers),
``return`` (host and sampled tokens on their way back), ``variation``, and ``fill`` (fewer batches than it takes).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import floor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensor_cast.ir.expr import Num

__all__ = [
    "CAUSES",
    "Flow",
    "Slot",
    "StageTimes",
    "busy_steps",
    "mixed_flow",
    "play",
    "prefill_seconds",
    "steady_flow",
]

Array = NDArray[np.float64]

#: Causes of bubbles, in the order in which they are shown.
CAUSES = ("imbalance", "p2p", "return", "variation", "fill")


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one step on each stage; numbers or arrays with one entry per batch size.

    Args:
        work: what each stage computes, collectives inside the stage included.
        hops: the transfer into each stage; 0 for the first.
        back: from the end of the last stage to the start of the batch's next step: sampled tokens and host.
        overlap: transfers do not occupy the receiving stage.
    """

    work: tuple[Num, ...]
    hops: tuple[Num, ...]
    back: Num
    overlap: bool = False

    def __post_init__(self) -> None:
        if not self.work or len(self.work) != len(self.hops):
            raise ValueError(f"need a transfer for each stage; {len(self.work)} stages, {len(self.hops)} transfers")

    @cached_property
    def latency(self) -> Num:
        """One batch's way through all stages and back."""
        return sum(self.work) + sum(self.hops) + self.back

    def at(self, index: int) -> StageTimes:
        """The times of one batch size, as plain numbers."""

        def pick(value: Num) -> float:
            flat = np.ravel(np.asarray(value, dtype=np.float64))
            return float(flat[index if len(flat) > 1 else 0])

        return StageTimes(tuple(map(pick, self.work)), tuple(map(pick, self.hops)), pick(self.back), self.overlap)

    @cached_property
    def slots(self) -> tuple[Num, ...]:
        """Time for which a batch takes each stage: its work, and the transfer that the stage waits for."""
        if self.overlap:
            return self.work
        return tuple(work + hop for work, hop in zip(self.work, self.hops, strict=True))

    @cached_property
    def slot(self) -> Num:
        """Time for which a batch takes the slowest stage."""
        return _most(self.slots)


@dataclass(frozen=True)
class Flow:
    """A steady state of ``batches`` batches in flight.

    Args:
        cycle: seconds from a batch's step to its next.
        slot: seconds between batches at the slowest stage when it never waits.
        stage_slots: mean seconds for which one batch takes each stage; the longest is the straggler's.
        utilisation: share of the time that each stage computes.
        bubbles: idle share of all stages together by cause; with the mean utilisation they add up to 1.
    """

    batches: int
    cycle: Array
    slot: Array
    stage_slots: tuple[Array, ...]
    utilisation: tuple[Array, ...]
    bubbles: Mapping[str, Array]

    @property
    def mean_utilisation(self) -> Array:
        """Mean over the stages."""
        return np.asarray(sum(self.utilisation) / len(self.utilisation))


def steady_flow(times: StageTimes, batches: int) -> Flow:
    """The flow of ``batches`` batches whose steps are all alike."""
    return mixed_flow(times, times, 0.0, batches)


def mixed_flow(calm: StageTimes, busy: StageTimes, share: Num, batches: int) -> Flow:
    """The flow when a ``share`` of all steps takes the times of ``busy`` and the others those of ``calm``."""
    stages = len(calm.work)
    if batches < 1:
        raise ValueError(f"need a batch in flight; have {batches}")
    mean = [(1 - share) * a + share * b for a, b in zip(calm.work, busy.work, strict=True)]
    slowest = _most(mean)
    plain_slot = (1 - share) * calm.slot + share * busy.slot
    # With m batches no more than m steps are under way at once.
    any_busy = 1 - (1 - np.asarray(share, dtype=np.float64)) ** min(stages, batches)
    slot = (1 - any_busy) * calm.slot + any_busy * busy.slot
    latency = (1 - share) * calm.latency + share * busy.latency
    cycle = np.maximum(latency, batches * slot)
    hops = (1 - share) * sum(calm.hops) + share * sum(busy.hops)
    back = (1 - share) * calm.back + share * busy.back
    # What is left of a cycle beside the slots, and who is to blame for it.
    rest = cycle - batches * slot
    returning = np.minimum(rest, back)
    hopping = np.minimum(rest - returning, hops) if calm.overlap else np.zeros_like(rest)
    idle = {
        "imbalance": batches * sum(slowest - work for work in mean) / stages,
        "p2p": batches * (plain_slot - slowest) + hopping,
        "return": returning,
        "variation": batches * (slot - plain_slot),
        "fill": rest - returning - hopping,
    }
    return Flow(
        batches,
        np.asarray(cycle),
        np.asarray(slot),
        tuple(np.asarray((1 - share) * a + share * b) for a, b in zip(calm.slots, busy.slots, strict=True)),
        tuple(np.asarray(batches * work / cycle) for work in mean),
        {cause: np.asarray(seconds / cycle) for cause, seconds in idle.items()},
    )


@dataclass(frozen=True, slots=True)
class Slot:
    """One step of one batch on one stage: what came in from ``hop_begin`` to ``begin`` is worked on until ``end``."""

    stage: int
    batch: int
    step: int
    hop_begin: float
    begin: float
    end: float
    busy: bool


def busy_steps(share: float, count: int, at: int) -> list[bool]:
    """Which of ``count`` steps are busy ones: a ``share`` of them, evenly spaced, step ``at`` among them."""
    # Step k is busy where the number due passes a whole one; it does at ``at``, and 1e-9 is for rounding.
    due = [floor((k - at) * share + 1e-9) for k in range(-1, count)]
    return [after > before for before, after in pairwise(due)]


def play(calm: StageTimes, busy: StageTimes, kinds: Sequence[bool], batches: int) -> list[Slot]:
    """The steps of ``kinds`` (whether each is a busy one) on every stage, from empty stages on; times are numbers.

    Batches start in turn. A stage takes one batch at a time, in order; a batch starts its next step when its last
    tokens are back.
    """
    stages = len(calm.work)
    free = [0.0] * stages
    ready = [0.0] * batches
    out: list[Slot] = []
    for k, chunk in enumerate(kinds):
        batch = k % batches
        times = busy if chunk else calm
        now = ready[batch]
        for stage in range(stages):
            hop = times.hops[stage]
            # An overlapped transfer goes on while the stage works on the batch before.
            start = now if times.overlap else max(now, free[stage])
            begin = max(start + hop, free[stage])
            now = free[stage] = begin + times.work[stage]
            out.append(Slot(stage, batch, k // batches, begin - hop, begin, now, chunk))
        ready[batch] = now + times.back
    return out


def prefill_seconds(times: StageTimes, chunks: float, batches: int) -> tuple[Array, Array]:
    """(time to the first token, seconds between prompts) of prompts that go through in ``chunks`` chunks each.

    A chunk needs of the one before it only what that left in the same stage's cache, so chunks of a prompt follow each
    other like batches: the first takes a whole cycle, each further one comes one m-th of a cycle later.
    """
    cycle = steady_flow(times, batches).cycle
    return cycle * (1.0 + (chunks - 1.0) / batches), chunks * cycle / batches


def _most(values: Sequence[Num]) -> Any:
    out = values[0]
    for value in values[1:]:
        out = np.maximum(out, value)
    return out
