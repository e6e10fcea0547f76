"""Pipeline stages over gloo: each rank runs its stage, hands its slice on, and gets the sampled tokens back.

Ranks lie as engines place them, tp fastest: ``rank = stage * tp + tp_rank``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tensor_cast.ir.record import Phase
from tensor_cast.layers.context import ParallelContext, Step
from tensor_cast.layers.stage import Boundary, StageLink, StageProgram
from tensor_cast.model_config import ModelConfig
from tensor_cast.ops.kv_layout import blocks_per_request, slot_mapping
from tensor_cast.proof.launch import shared_pool, use_groups
from tensor_cast.proof.weights import random_anatomy

__all__ = ["PipelineJob", "run_pipeline"]


@dataclass(frozen=True)
class PipelineJob:
    """One pipeline to run.

    Args:
        config: the model, small.
        tp: ranks of a stage.
        partition: layers of each stage.
        prompt: tokens of each request's prompt.
        steps: decode steps after it; each takes the token that the last stage sampled.
        batch: requests.
        block_size: of the caches.
        seed: of weights and tokens.
    """

    config: ModelConfig
    tp: int
    partition: tuple[int, ...]
    prompt: int = 9
    steps: int = 3
    batch: int = 2
    block_size: int = 4
    seed: int = 0

    @property
    def ranks(self) -> int:
        """Ranks of all stages."""
        return self.tp * len(self.partition)

    def prompts(self) -> torch.Tensor:
        """Tokens [batch, prompt]."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randint(3, self.config.vocab_size, (self.batch, self.prompt), generator=generator)


def run_pipeline(job: PipelineJob) -> list[tuple[list[np.ndarray], np.ndarray]]:
    """Per rank: logits of every step (on the last stage only) and all tokens, generated ones included."""
    return shared_pool(job.ranks).run(_run_rank, [(job, rank) for rank in range(job.ranks)])


def _run_rank(job: PipelineJob, rank: int) -> tuple[list[np.ndarray], np.ndarray]:
    stage, tp_rank = divmod(rank, job.tp)
    first = stage * job.tp
    groups = {"tp": tuple(range(first, first + job.tp)), "pp": tuple(range(tp_rank, job.ranks, job.tp))}
    use_groups(groups, rank)
    ctx = ParallelContext(tp=job.tp, rank=tp_rank)
    link = StageLink(ctx, stage, len(job.partition))
    with torch.inference_mode():
        anatomy = random_anatomy(job.config, job.seed, False)
        dtype = getattr(torch, job.config.dtype)
        program = StageProgram(anatomy, ctx, job.partition, stage)
        longest = job.prompt + job.steps
        blocks = blocks_per_request(longest, job.block_size, 1)
        order = torch.randperm(job.batch * blocks, generator=torch.Generator().manual_seed(job.seed))
        table = order.view(job.batch, blocks)
        caches = program.caches(job.batch * blocks, job.block_size, dtype)
        # Only the first stage knows the prompt; the others learn the tokens that come back.
        tokens = job.prompts() if program.first else torch.zeros(job.batch, job.prompt, dtype=torch.int64)
        sent = torch.zeros(job.batch, 0, dtype=torch.int64)
        logits: list[np.ndarray] = []
        start = 0
        for number in range(1 + job.steps):
            query = tokens if number == 0 else sent[:, -1:]
            length = query.shape[1]
            positions = torch.arange(start, start + length).expand(job.batch, -1)
            slots = slot_mapping(positions, table, block_size=job.block_size, dcp=1, rank=0, interleave=1)
            phase = Phase.PREFILL if number == 0 else Phase.DECODE
            step = Step(phase, positions, start + length, table.to(torch.int32), slots, caches)
            received = None
            if not program.first:
                hidden = torch.empty(job.batch, length, job.config.hidden_size, dtype=dtype)
                received = link.receive([hidden, hidden])
            result = program.run(query, step, received)
            sampled = torch.zeros(job.batch, 1, dtype=torch.int64)
            if isinstance(result, Boundary):
                link.send(result)
            else:
                logits.append(result.numpy())
                sampled = result[:, -1:].argmax(-1)
            sent = torch.cat([sent, link.broadcast(sampled)], dim=1)
            start += length
        return logits, sent.numpy()
