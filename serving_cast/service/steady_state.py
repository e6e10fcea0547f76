"""Closed forms for a serving instance in its steady state, for every batch size at once.

All functions take the prices of one decode step and one prefill step as objects with ``seconds(env, scopes)`` and
return arrays with one entry per batch size. They know no device, no memory and no layout.

Legend: ``b`` decodes of one rank, ``k`` draft tokens, ``t`` tokens a request gains per step, ``ISL_new`` prompt tokens
without the cached prefix, ``C`` prompt tokens that fit a step beside the decodes.

Aggregated mode
---------------
Each of the ``b`` requests gains ``t`` tokens per step, so ``r = b*t/OSL`` requests end and as many arrive per step,
with ``P = r*ISL_new`` prompt tokens. The first of the OSL tokens comes from the prompt's last chunk; charging a decode
for it too overstates the decode work by one part in OSL, and keeps throughput = concurrency / TPOT exact.

P is a mean. A scheduler with a token budget does not spread the tokens evenly: it runs a prompt in chunks of
``q = min(ISL_new, C)`` as soon as it can, ``C = budget - b*(1+k)``. So a share ``P/q`` of the steps carries a chunk
(and takes ``T1``), the others carry none (``T0``). Above one chunk per step each step holds ``P/q`` prompts. The mean
step

    step = (1 - s)*T0 + s*T1,    s = min(1, P/q)

is what a request waits per step, so TPOT = step/t. P, q, s and both times are continuous in every parameter, at
ISL_new = C too. The ranks of a DP group are taken to run their chunks in the same steps.

TTFT = what is left of the running step, E[T^2]/(2 E[T]), + queueing for the prompt budget, which is busy a share
``u = P/C`` of the time: u/(2(1-u)) prompts' worth of steps (M/D/1), diverging as u -> 1, + the prompt's own
``max(1, ISL_new/C)`` chunk steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from serving_cast.config import Workload
from tensor_cast.ir.expr import Num
from tensor_cast.ir.record import Scope

__all__ = ["GRIDS", "AggregatedGrid", "ContextGather", "DecodeGrid", "PrefillGrid", "SteadyState", "StepPricer"]

Array = NDArray[np.float64]
Env = Mapping[str, Num]

_ALL = tuple(Scope)


class StepPricer(Protocol):
    """Prices one phase's step on one layout."""

    def seconds(self, env: Env, scopes: Collection[Scope]) -> Mapping[Scope, Num]:
        """Seconds of the ops of each of ``scopes`` under ``env`` (B, Q, S as numbers or arrays)."""
        ...


class ContextGather(Protocol):
    """Prices what a prefill chunk adds on an instance whose cache is split over DCP ranks."""

    def __call__(self, prompts: Array, chunk: Array, context: Array, share: Array) -> Num:
        """Seconds for ``prompts`` chunks of ``chunk`` tokens with ``context`` cached tokens before each in the mean.

        ``share`` is the part of the chunks that have any context before them.
        """
        ...


@dataclass(frozen=True)
class SteadyState:
    """One entry per batch size; times in seconds, rates per step of one rank.

    ``within_budget`` is false where ``step_tokens``, the query tokens of a mean step, exceed ``budget``; the other
    fields mean nothing there. ``ttft`` or ``tpot`` is None where the phase has none.
    """

    step: Array
    requests_per_second: Array
    tokens_per_second: Array
    step_tokens: Array
    budget: int
    within_budget: NDArray[np.bool_]
    ttft: Array | None = None
    tpot: Array | None = None


@dataclass(frozen=True)
class DecodeGrid:
    """Decode alone: a step is ``b`` requests of 1 + k tokens at the mean context."""

    workload: Workload
    budget: int
    batches: Array
    env: Env

    @classmethod
    def build(cls, workload: Workload, budget: int, batches: Array) -> DecodeGrid:
        """The grid for these batch sizes; shared by all layouts, so that they can share prices."""
        env = {"B": batches, "Q": float(workload.query_length), "S": workload.mean_decode_context}
        return cls(workload, budget, batches, env)

    def solve(self, pricer: StepPricer, host_s: float) -> SteadyState:
        """TPOT = step / t. The prefill instance made the first token, so a request takes OSL - 1 tokens from here."""
        w = self.workload
        step = _total(pricer.seconds(self.env, _ALL), self.batches) + host_s
        tokens = self.batches * w.tokens_per_step / step
        return SteadyState(
            step=step,
            tpot=step / w.tokens_per_step,
            tokens_per_second=tokens,
            requests_per_second=tokens / max(1, w.output_length - 1),
            step_tokens=self.batches * w.query_length,
            budget=self.budget,
            within_budget=self.batches * w.query_length <= self.budget,
        )


@dataclass(frozen=True)
class PrefillGrid:
    """Prefill alone: ``b`` prompts together in one step, or one prompt in chunks of the token budget."""

    workload: Workload
    budget: int
    batches: Array
    chunks: float
    env: Env

    @classmethod
    def build(cls, workload: Workload, budget: int, batches: Array) -> PrefillGrid:
        """The grid for these batch sizes. A prompt beyond the budget takes ISL_new / budget steps."""
        new = workload.new_input_tokens
        chunk = min(new, float(budget))
        context = workload.cached_input_tokens + (new + chunk) / 2
        return cls(workload, budget, batches, new / chunk, {"B": batches, "Q": chunk, "S": context})

    def solve(self, pricer: StepPricer, host_s: float) -> SteadyState:
        """TTFT is the time of the batch: its prompts start together and all end with its last step."""
        w = self.workload
        step = _total(pricer.seconds(self.env, _ALL), self.batches) + host_s
        ttft = step * self.chunks
        rate = self.batches / ttft
        fits = (self.batches * w.new_input_tokens <= self.budget) | (self.batches == 1)
        return SteadyState(
            step=step,
            ttft=ttft,
            requests_per_second=rate,
            tokens_per_second=rate * w.input_length,
            step_tokens=self.batches * float(self.env["Q"]),
            budget=self.budget,
            within_budget=fits,
        )


@dataclass(frozen=True)
class AggregatedGrid:
    """Prefill and decode on one instance; see the module's text for the model."""

    workload: Workload
    budget: int
    batches: Array
    arrivals: Array  # r, requests per step
    utilisation: Array  # u = P/C
    share: Array  # s, share of steps with a chunk
    prompts: Array  # chunks in a step that has any
    chunk: Array  # q
    chunks_per_prompt: Array
    within_budget: NDArray[np.bool_]
    decode_env: Env
    mixed_env: Env
    sample_env: Env
    prefill_env: Env

    @classmethod
    def build(cls, workload: Workload, budget: int, batches: Array) -> AggregatedGrid:
        """The grid for these batch sizes; shared by all layouts, so that they can share prices."""
        w = workload
        query, new = float(w.query_length), w.new_input_tokens
        arrivals = batches * w.tokens_per_step / w.output_length
        load = arrivals * new
        room = budget - batches * query
        within = load < room
        room = np.where(within, room, load + 1.0)  # any positive number: these entries are masked
        chunk = np.minimum(new, room)
        prompts = np.maximum(1.0, load / chunk)
        chunks = new / chunk
        context = w.cached_input_tokens + (new + chunk) / 2
        decode = {"B": batches, "Q": query, "S": w.mean_decode_context}
        return cls(
            workload=w,
            budget=budget,
            batches=batches,
            arrivals=arrivals,
            utilisation=load / room,
            share=np.minimum(1.0, load / chunk),
            prompts=prompts,
            chunk=chunk,
            chunks_per_prompt=chunks,
            within_budget=within,
            decode_env=decode,
            # Tokens per decode of a chunk step: the chunks' tokens run through the shared layers with the decodes'.
            mixed_env={**decode, "Q": query + prompts * chunk / batches},
            # Only a prompt's last chunk is sampled.
            sample_env={**decode, "Q": query + prompts / chunks / batches},
            prefill_env={"B": prompts, "Q": chunk, "S": context},
        )

    def solve(
        self, decode: StepPricer, prefill: StepPricer, host_s: float, gather: ContextGather | None = None
    ) -> SteadyState:
        """Mean step, TPOT, TTFT and rates of one rank for every batch size."""
        w = self.workload
        plain = decode.seconds(self.decode_env, _ALL)
        attention = plain[Scope.SEQUENCE]
        calm = _total(plain, self.batches) + host_s
        chunk_step = (
            decode.seconds(self.mixed_env, (Scope.TOKEN,))[Scope.TOKEN]
            + decode.seconds(self.sample_env, (Scope.SAMPLE,))[Scope.SAMPLE]
            + attention
            + prefill.seconds(self.prefill_env, (Scope.SEQUENCE,))[Scope.SEQUENCE]
            + host_s
        )
        if gather is not None:
            chunk_step = chunk_step + gather(self.prompts, self.chunk, *self.context_before())
        step = (1.0 - self.share) * calm + self.share * chunk_step
        running = ((1.0 - self.share) * calm**2 + self.share * chunk_step**2) / (2.0 * step)
        u = self.utilisation
        room = self.budget - self.batches * w.query_length
        backlog = u / (2.0 * (1.0 - u)) * w.new_input_tokens / np.where(self.within_budget, room, 1.0)
        tokens = self.batches * w.tokens_per_step / step
        return SteadyState(
            step=step,
            tpot=step / w.tokens_per_step,
            ttft=running + (backlog + self.chunks_per_prompt) * chunk_step,
            tokens_per_second=tokens,
            requests_per_second=tokens / w.output_length,
            step_tokens=self.batches * w.query_length + self.arrivals * w.new_input_tokens,
            budget=self.budget,
            within_budget=self.within_budget,
        )

    def context_before(self) -> tuple[Array, Array]:
        """Mean tokens cached before a chunk, and the share of chunks that have any.

        A prompt's first chunk has context only if a prefix hit. Hits come in blocks; below 16 tokens, the smallest
        block any engine uses, the share falls to zero smoothly.
        """
        cached = self.workload.cached_input_tokens
        before = cached + (self.workload.new_input_tokens - self.chunk) / 2
        first = min(1.0, cached / 16.0)
        return before, 1.0 - (1.0 - first) / self.chunks_per_prompt


#: How the grid of each serving phase is built.
GRIDS: Mapping[str, Callable[[Workload, int, Array], AggregatedGrid | DecodeGrid | PrefillGrid]] = {
    "aggregated": AggregatedGrid.build,
    "prefill": PrefillGrid.build,
    "decode": DecodeGrid.build,
}


def _total(scopes: Mapping[Scope, Num], like: Array) -> Array:
    """Sum over scopes, one entry per batch size even where nothing depends on it."""
    total: Any = 0.0
    for seconds in scopes.values():
        total = total + seconds
    return np.broadcast_to(np.asarray(total, dtype=np.float64), like.shape)
