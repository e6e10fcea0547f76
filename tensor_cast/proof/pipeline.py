"""Pipeline stages over gloo: each rank runs its stage, hands its slice on, and gets the sampled tokens back.

Ranks lie as engines place them, tp fastest: ``rank = stage * tp + tp_rank``. Everything runs in float64, as cells do.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from tensor_cast.ir.record import Phase
from tensor_cast.layers.boundary import Boundary, StageLink
from tensor_cast.layers.choice_flow import self_computing
from tensor_cast.layers.context import ParallelContext, Step
from tensor_cast.layers.stage import StageProgram
from tensor_cast.model_config import ModelConfig
from tensor_cast.ops.kv_layout import blocks_per_request, slot_mapping
from tensor_cast.pipeline_partition import DsaSplit
from tensor_cast.proof.launch import shared_pool, use_groups
from tensor_cast.proof.precision import KeepDouble
from tensor_cast.proof.reference import whole_model
from tensor_cast.proof.session import Inside
from tensor_cast.proof.weights import random_anatomy

__all__ = ["PipelineJob", "StageRun", "largest_difference", "run_pipeline"]


@dataclass(frozen=True)
class PipelineJob:
    """One pipeline to run.

    Args:
        model: the model, small.
        tp: ranks of a stage.
        partition: layers of each stage.
        dsa_split: what becomes of layers that reuse top-k indices of another stage.
        prompt: tokens of each request's prompt.
        steps: decode steps after it; each takes the token that the last stage sampled.
        batch: requests.
        block_size: of the caches.
        seed: of weights and tokens.
        inside: see :data:`tensor_cast.proof.session.Inside`.
    """

    model: ModelConfig
    tp: int
    partition: tuple[int, ...]
    dsa_split: DsaSplit | None = None
    prompt: int = 9
    steps: int = 3
    batch: int = 2
    block_size: int = 4
    seed: int = 0
    inside: Inside | None = None

    @property
    def config(self) -> ModelConfig:
        """The model that runs: under ``self-compute`` with the indexers that the partition needs."""
        own = self.dsa_split is DsaSplit.SELF_COMPUTE
        return self_computing(self.model, self.partition) if own else self.model

    @property
    def ranks(self) -> int:
        """Ranks of all stages."""
        return self.tp * len(self.partition)

    def prompts(self) -> torch.Tensor:
        """Tokens [batch, prompt]."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randint(3, self.model.vocab_size, (self.batch, self.prompt), generator=generator)


@dataclass(frozen=True)
class StageRun:
    """What one rank did.

    Args:
        logits: per step [batch, Q, V], on the last stage only.
        sampled: [batch, 1 + steps], the tokens that came back from the last stage.
        sent: per step, bytes that this rank sent to the next stage.
    """

    logits: list[np.ndarray]
    sampled: np.ndarray
    sent: list[int]


def run_pipeline(job: PipelineJob) -> list[StageRun]:
    """What each rank did.

    Raises:
        LegalityError: the partition does not fit the model.
        RankError: a rank failed.
    """
    # Raises in this process, where it reads best.
    StageProgram(
        random_anatomy(job.config, job.seed, True), ParallelContext(), job.partition, 0, dsa_split=job.dsa_split
    )
    return shared_pool(job.ranks).run(_run_rank, [(job, rank) for rank in range(job.ranks)])


def largest_difference(job: PipelineJob, runs: list[StageRun]) -> list[float]:
    """Per step, the largest difference of a logit of the last stage from Transformers' whole model.

    The model is given the tokens that the pipeline sampled, so that a step does not suffer from the one before; NaN
    where a logit is not a number.
    """
    theirs = whole_model(job.config, job.seed, True)
    last = runs[-job.tp :]
    tokens, out = job.prompts(), []
    for step in range(1 + job.steps):
        with torch.inference_mode(), KeepDouble():
            wanted = theirs(input_ids=tokens, use_cache=False).logits.numpy()
        out.append(max(float(np.abs(run.logits[step] - wanted[:, -run.logits[step].shape[1] :]).max()) for run in last))
        tokens = torch.cat([tokens, torch.from_numpy(last[0].sampled[:, step : step + 1])], dim=1)
    return out


def _run_rank(job: PipelineJob, rank: int) -> StageRun:
    stage, tp_rank = divmod(rank, job.tp)
    first = stage * job.tp
    groups = {"tp": tuple(range(first, first + job.tp)), "pp": tuple(range(tp_rank, job.ranks, job.tp))}
    use_groups(groups, rank)
    ctx = ParallelContext(tp=job.tp, rank=tp_rank)
    link = StageLink(ctx, stage, len(job.partition))
    with torch.inference_mode(), KeepDouble(), job.inside() if job.inside else nullcontext():
        anatomy = random_anatomy(job.config, job.seed, True)
        program = StageProgram(anatomy, ctx, job.partition, stage, dsa_split=job.dsa_split)
        longest = job.prompt + job.steps
        blocks = blocks_per_request(longest, job.block_size, 1)
        order = torch.randperm(job.batch * blocks, generator=torch.Generator().manual_seed(job.seed))
        table = order.view(job.batch, blocks)
        caches = program.caches(job.batch * blocks, job.block_size, torch.float64)
        # Only the first stage knows the prompt; the others learn the tokens that come back.
        query = job.prompts() if program.first else torch.zeros(job.batch, job.prompt, dtype=torch.int64)
        logits, sampled, sent, start = [], [], [], 0
        for number in range(1 + job.steps):
            length = query.shape[1]
            positions = torch.arange(start, start + length).expand(job.batch, -1)
            slots = slot_mapping(positions, table, block_size=job.block_size, dcp=1, rank=0, interleave=1)
            phase = Phase.PREFILL if number == 0 else Phase.DECODE
            step = Step(phase, positions, start + length, table.to(torch.int32), slots, caches)
            expected = None if program.first else program.boundary(job.batch, length, torch.float64)
            result = program.run(query, step, None if expected is None else link.receive(expected))
            query = torch.empty(job.batch, 1, dtype=torch.int64)
            if isinstance(result, Boundary):
                sent.append(link.send(result))
            else:
                logits.append(result.numpy())
                query = result[:, -1:].argmax(-1)
            query = link.broadcast(query)
            sampled.append(query)
            start += length
    return StageRun(logits, torch.cat(sampled, dim=1).numpy(), sent)
