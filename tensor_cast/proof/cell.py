"""What one run proves: a layout, the form of the KV cache, and the requests that go through it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from tensor_cast.errors import ConfigError
from tensor_cast.layers.context import ParallelContext
from tensor_cast.model_config import ParallelConfig


@dataclass(frozen=True)
class Cell:
    """One cell of the equivalence matrix.

    Args:
        tp, dp, ep, moe_dp, dcp: ranks per axis.
        semantics, interleave: of DCP.
        block_size: tokens per physical KV block.
        query: tokens per request in each decode step: 1, or 1 + k with k tokens to verify.
        prompts: tokens of each request's prompt on DP rank 0; rank d has the same lengths, rotated by d.
        steps: decode steps after the prompt.
        prefill: how the prompt gets in when dcp > 1. ``handover``: a prefill step with dcp = 1, whose cache is then
            dealt to the ranks (what prefill instances do, and ranks that keep only their share of what they computed);
            ``chunks``: through the split cache itself, ``chunk`` tokens at a time like tokens to verify.
        chunk: see ``prefill``.
    """

    tp: int = 1
    dp: int = 1
    ep: int = 1
    moe_dp: int = 1
    dcp: int = 1
    semantics: str = "vllm-ascend"
    interleave: int = 1
    block_size: int = 4
    query: int = 1
    prompts: tuple[int, ...] = (1, 8, 11)
    steps: int = 3
    prefill: str = "handover"
    chunk: int = 4

    def __post_init__(self) -> None:
        if self.prefill not in ("handover", "chunks"):
            raise ConfigError(f"prefill is {self.prefill!r}; it must be 'handover' or 'chunks'")
        numbers = [getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), int)]
        if min(*numbers, *self.prompts) < 1:
            raise ConfigError(f"sizes of a run must be at least 1: {self}")

    @property
    def ranks(self) -> int:
        """Processes of the run."""
        return self.tp * self.dp

    @property
    def context(self) -> ParallelContext:
        """Rank 0 of the layout. Raises :class:`LegalityError`."""
        return ParallelContext(
            tp=self.tp,
            dcp=self.dcp,
            dp=self.dp,
            ep=self.ep,
            moe_dp=self.moe_dp,
            dcp_semantics=self.semantics,
            interleave=self.interleave,
        )

    @property
    def parallel(self) -> ParallelConfig:
        """The layout as the planner has it."""
        return ParallelConfig(
            tensor_parallel_size=self.tp,
            data_parallel_size=self.dp,
            expert_parallel_size=self.ep,
            moe_data_parallel_size=self.moe_dp,
            decode_context_parallel_size=self.dcp,
            cp_kv_cache_interleave_size=self.interleave,
        )

    @property
    def label(self) -> str:
        """Short name: ``tp4-dp2-ep8-dcp2.vllm-i1-bs4-q3``; sizes of 1 are left out of the layout."""
        sizes = ("dp", self.dp), ("ep", self.ep), ("moedp", self.moe_dp)
        words = [f"tp{self.tp}", *(f"{name}{size}" for name, size in sizes if size > 1)]
        if self.dcp > 1:
            words += [f"dcp{self.dcp}.{self.semantics}", f"i{self.interleave}"]
        words += [f"bs{self.block_size}", f"q{self.query}"]
        if self.dcp > 1 and self.prefill != "handover":
            words.append(self.prefill)
        return "-".join(words)

    # -- schedule -----------------------------------------------------------------------------------------------
    def requests(self, dp_rank: int) -> tuple[int, ...]:
        """Prompt lengths of one DP rank's requests."""
        shift = dp_rank % len(self.prompts)
        return self.prompts[shift:] + self.prompts[:shift]

    def accepted(self, step: int, request: int) -> int:
        """Tokens of a decode step that stay; the others were drafted wrongly and are written over by the next step."""
        return 1 + (step + request) % self.query

    @property
    def longest(self) -> int:
        """Tokens of the longest request at the end, drafted ones included: what the cache must hold."""
        ends = []
        for request, prompt in enumerate(self.prompts):
            for dp_rank in range(self.dp):
                place = (request - dp_rank) % len(self.prompts)
                ends.append(prompt + sum(self.accepted(s, place) for s in range(self.steps)) + self.query)
        return max(ends)

    def pieces(self, dp_rank: int, request: int) -> Iterator[int]:
        """Tokens that one request gains in each step: the prompt, then the accepted ones."""
        yield self.requests(dp_rank)[request]
        for step in range(self.steps):
            yield self.accepted(step, request)
