"""Requests going through one rank's program: prompt, decode steps, a paged KV cache that stays between them.

Legend: B requests of a DP rank, Q tokens of a step, V vocabulary, H hidden size, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tensor_cast.ir.record import OpRecord, Phase
from tensor_cast.layers.collectives import all_gather
from tensor_cast.layers.context import ParallelContext, Step
from tensor_cast.layers.program import Anatomy, RankProgram
from tensor_cast.model_config import ModelConfig
from tensor_cast.ops.kv_layout import blocks_per_request, slot_mapping
from tensor_cast.proof.cell import Cell
from tensor_cast.proof.launch import use_axes
from tensor_cast.proof.precision import KeepDouble
from tensor_cast.proof.record import record_phases
from tensor_cast.proof.weights import random_anatomy

#: Made by name on every rank and entered around its work; the mutation check breaks the program in it.
Inside = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Job:
    """What the ranks of one run do.

    Args:
        config: the model.
        cell: layout and requests.
        seed: of weights and tokens.
        double: run in float64 throughout (:class:`KeepDouble`), else as the configuration says.
        compare: run the requests.
        record: also record one prefill and one decode step on rank 0.
        inside: see :data:`Inside`.
    """

    config: ModelConfig
    cell: Cell
    seed: int = 0
    double: bool = True
    compare: bool = True
    record: bool = True
    inside: Inside | None = None


@dataclass(frozen=True)
class RankRun:
    """What one rank computed.

    Args:
        logits: per step [B, Q, V]; rows of padding hold whatever came out.
        layers: per step [L, B, Q, H], outputs of the decoder layers.
        sampled: per step [B, Q].
        ops: recorded ops by phase, on rank 0.
    """

    logits: list[np.ndarray]
    layers: list[np.ndarray]
    sampled: list[np.ndarray]
    ops: dict[Phase, tuple[OpRecord, ...]]


def run_rank(job: Job, rank: int) -> RankRun:
    """Work of one rank of a pool."""
    ctx = job.cell.context.at(rank)
    use_axes(ctx)
    # What a fault touches must neither come out of the store nor go into it.
    anatomy_of = random_anatomy.__wrapped__ if job.inside else random_anatomy
    with torch.inference_mode(), job.inside() if job.inside else nullcontext():
        logits: list[np.ndarray] = []
        layers: list[np.ndarray] = []
        sampled: list[np.ndarray] = []
        if job.compare:
            with KeepDouble() if job.double else nullcontext():
                anatomy = anatomy_of(job.config, job.seed, job.double)
                dtype = torch.float64 if job.double else getattr(torch, job.config.dtype)
                session = Session(anatomy, ctx, job.cell, dtype, job.seed)
                session.run()
            logits, layers, sampled = session.logits, session.layers, session.sampled
        ops = {}
        if job.record:
            ops = record_phases(anatomy_of(job.config, job.seed, False), ctx, job.cell, job.config)
        return RankRun(logits, layers, sampled, ops)


def token_ids(cell: Cell, dp_rank: int, vocab: int, seed: int) -> torch.Tensor:
    """Tokens of one DP rank's requests, [B, longest]."""
    generator = torch.Generator().manual_seed(1000 * seed + dp_rank)
    return torch.randint(3, vocab, (len(cell.prompts), cell.longest), generator=generator)


class Session:
    """One rank serving its requests.

    Args:
        anatomy: of the whole model, with its weights.
        ctx: the rank.
        cell: what to run.
        dtype: of the KV cache.
        seed: of tokens and page order.

    ``logits``, ``layers`` and ``sampled`` are those of :class:`RankRun`.
    """

    def __init__(self, anatomy: Anatomy, ctx: ParallelContext, cell: Cell, dtype: torch.dtype, seed: int) -> None:
        self.logits: list[np.ndarray] = []
        self.layers: list[np.ndarray] = []
        self.sampled: list[np.ndarray] = []
        self._anatomy, self._ctx, self._cell, self._dtype, self._seed = anatomy, ctx, cell, dtype, seed
        self._ids = token_ids(cell, ctx.dp_rank, anatomy.model.config.vocab_size, seed)
        self._prompts = torch.tensor(cell.requests(ctx.dp_rank))
        self._program = RankProgram(anatomy, ctx)
        self._table, self._caches = self._pages(self._program)

    def _pages(self, program: RankProgram) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Block table [B, blocks] in a shuffled order and caches with one page more, which nobody owns."""
        cell, batch = self._cell, len(self._prompts)
        blocks = blocks_per_request(cell.longest, cell.block_size, program.ctx.dcp)
        order = torch.randperm(batch * blocks, generator=torch.Generator().manual_seed(self._seed + program.ctx.dcp))
        caches = program.caches(batch * blocks + 1, cell.block_size, self._dtype)
        for cache in caches.values():
            cache.fill_(_UNWRITTEN)
        return 1 + order.view(batch, blocks), caches

    def run(self) -> None:
        """The prompts, then every decode step."""
        width = int(self._prompts.max())
        if self._ctx.dcp == 1:
            self._keep([self._step(self._program, self._table, self._caches, Phase.PREFILL, 0, width)])
        elif self._cell.prefill == "handover":
            self._keep([self._prefill_elsewhere(width)])
        else:
            chunks = []
            for start in range(0, width, self._cell.chunk):
                length = min(self._cell.chunk, width - start)
                chunks.append(self._step(self._program, self._table, self._caches, Phase.DECODE, start, length))
            self._keep(chunks)
        starts = self._prompts.clone()
        drafts = torch.Generator().manual_seed(self._seed + 17)
        for number in range(self._cell.steps):
            self._keep([self._decode(starts, number, drafts)])
            starts += torch.tensor([self._cell.accepted(number, r) for r in range(len(starts))])

    # -- steps --------------------------------------------------------------------------------------------------
    def _step(
        self,
        program: RankProgram,
        table: torch.Tensor,
        caches: dict[int, torch.Tensor],
        phase: Phase,
        start: int,
        length: int,
    ) -> tuple[torch.Tensor, ...]:
        """A piece of the prompts; shorter ones are padded with tokens that leave nothing in the cache."""
        positions = torch.arange(start, start + length).expand(len(self._prompts), -1)
        stored = positions < self._prompts[:, None]
        return self._call(program, self._ids[:, start : start + length], positions, stored, table, caches, phase)

    def _decode(self, starts: torch.Tensor, number: int, drafts: torch.Generator) -> tuple[torch.Tensor, ...]:
        query = self._cell.query
        positions = starts[:, None] + torch.arange(query)
        ids = self._ids.gather(1, positions)
        wrong = torch.randint(3, self._anatomy.model.config.vocab_size, ids.shape, generator=drafts)
        accepted = torch.tensor([self._cell.accepted(number, r) for r in range(len(starts))])
        ids = torch.where(torch.arange(query) < accepted[:, None], ids, wrong)
        stored = torch.ones_like(positions, dtype=torch.bool)
        return self._call(self._program, ids, positions, stored, self._table, self._caches, Phase.DECODE)

    def _call(
        self,
        program: RankProgram,
        ids: torch.Tensor,
        positions: torch.Tensor,
        stored: torch.Tensor,
        table: torch.Tensor,
        caches: dict[int, torch.Tensor],
        phase: Phase,
    ) -> tuple[torch.Tensor, ...]:
        ctx = program.ctx
        slots = _slots(positions, table, self._cell.block_size, ctx).masked_fill(~stored.flatten(), -1)
        rows = table.to(torch.int32)
        if ctx.dcp > 1:
            rows = rows.repeat_interleave(ids.shape[1], 0)
        step = Step(phase, positions, int(positions.max()) + 1, rows, slots, caches)
        with _layer_outputs(program, self._anatomy) as outputs:
            sampled, logits = program(ids, step)
        return logits, torch.stack(outputs), sampled

    def _keep(self, pieces: list[tuple[torch.Tensor, ...]]) -> None:
        """File the outputs of one step, or of the chunks that make it up."""
        for kept, dim, parts in zip(
            (self.logits, self.layers, self.sampled), (1, 2, 1), zip(*pieces, strict=True), strict=True
        ):
            kept.append(torch.cat(parts, dim=dim).numpy())

    # -- prefill with dcp > 1 -----------------------------------------------------------------------------------
    def _prefill_elsewhere(self, width: int) -> tuple[torch.Tensor, ...]:
        """Prefill with dcp = 1 into a cache of its own, then deal the tokens to the ranks of the DCP group."""
        program = RankProgram(self._anatomy, replace(self._ctx, dcp=1))
        table, caches = self._pages(program)
        out = self._step(program, table, caches, Phase.PREFILL, 0, width)
        positions = torch.arange(width).expand(len(self._prompts), -1)
        block_size = self._cell.block_size
        source = _slots(positions, table, block_size, program.ctx).long()
        prompt = (positions < self._prompts[:, None]).flatten()
        for key, cache in self._caches.items():
            # A cache whose blocks hold all tokens of the group is kept whole by every rank (an indexer's, vllm-ascend).
            whole = cache.dim() < 5 and cache.shape[1] > block_size
            ctx = program.ctx if whole else self._ctx
            target = _slots(positions, self._table, cache.shape[1] if whole else block_size, ctx).long()
            mine = prompt & (target >= 0)
            if cache.dim() == 5:  # keys and values with heads; else one row per token
                planes = self._heads_of_group(caches[key].flatten(1, 2)[:, source], cache.shape[3])
            else:
                planes, cache = caches[key].flatten(0, 1)[None, source], cache[None]
            cache.flatten(1, 2)[:, target[mine]] = planes[:, mine]
        return out

    def _heads_of_group(self, rows: torch.Tensor, wanted: int) -> torch.Tensor:
        """From the KV heads of prefill, [2, T, heads, D], to the ``wanted`` ones that this rank keeps in decode.

        The engines' semantics keep the same heads; under ``rfc`` a rank holds those of its whole DCP group.
        """
        ctx, held, total = self._ctx, rows.shape[2], self._anatomy.model.config.num_key_value_heads
        if wanted == held:
            return rows
        everyone = all_gather(rows[None], "dcp", ctx.dcp)
        first = ctx.tp_rank - ctx.dcp_rank
        begins = [(first + i) * total // ctx.tp for i in range(ctx.dcp)]
        picked = []
        for head in range(begins[0], begins[0] + wanted):
            rank = next(i for i, begin in enumerate(begins) if begin <= head < begin + held)
            picked.append(everyone[rank, :, :, head - begins[rank]])
        return torch.stack(picked, dim=2)


#: What unwritten cache slots hold: a finite number that no result survives if a slot is read that should not be.
_UNWRITTEN = 1e3


def _slots(positions: torch.Tensor, table: torch.Tensor, block_size: int, ctx: ParallelContext) -> torch.Tensor:
    return slot_mapping(
        positions, table, block_size=block_size, dcp=ctx.dcp, rank=ctx.dcp_rank, interleave=ctx.interleave
    )


@contextmanager
def _layer_outputs(program: RankProgram, anatomy: Anatomy) -> Iterator[list[torch.Tensor]]:
    """Collect what each decoder layer returns."""
    outputs: list[torch.Tensor] = []

    def note(module: Any, args: Any, output: Any) -> None:
        outputs.append((output[0] if isinstance(output, tuple) else output).clone())

    layers = [program.model.get_submodule(anatomy.layer_path(i)) for i in range(len(anatomy.layers))]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()
