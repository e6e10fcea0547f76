"""The draft module computes what DeepSeek-V3's report says, on one rank and on several."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from rank_threads import run_ranks
from test_layers_equal_transformers import randomised
from torch import nn
from tracer_models import tiny

from tensor_cast.ir.record import Phase
from tensor_cast.layers.context import ParallelContext, Step
from tensor_cast.layers.mtp import DraftModules
from tensor_cast.layers.program import SHARED_CHOICE, Anatomy, DraftProgram
from tensor_cast.ops.kv_layout import blocks_per_request, slot_mapping
from tensor_cast.tracer.builder import build

BATCH, QUERY, BLOCK = 2, 7, 4


def eager(anatomy: Anatomy, own: DraftModules) -> nn.Module:
    """The draft layer as Transformers runs it."""
    layer = copy.deepcopy(own.layer)
    for module in layer.modules():
        if hasattr(module, "config"):
            module.config = copy.deepcopy(module.config)
            module.config._attn_implementation = "eager"
            module.config._experts_implementation = "eager"
    return layer


def reference(
    anatomy: Anatomy, own: DraftModules, ids: torch.Tensor, hidden: torch.Tensor, choice: torch.Tensor | None = None
) -> tuple[torch.Tensor, Any]:
    """Equations 21 to 24 of the report, with Transformers' own layer and eager attention.

    With ``choice`` [B, 1, K] its sparse attention shares what another layer chose, which is how Transformers does it.

    Returns:
        logits [B, 1, V] of the last token, and what the layer says it chose [B, Q, K].
    """
    model = anatomy.model
    joined = torch.cat([own.projection.enorm(model.model.embed_tokens(ids)), own.projection.hnorm(hidden)], dim=-1)
    x = joined @ own.projection.eh_proj.weight.T
    positions = torch.arange(ids.shape[1])[None]
    layer, shared = eager(anatomy, own), {}
    if choice is not None:
        layer.self_attn.indexer = None
        shared = {SHARED_CHOICE: choice.expand(-1, ids.shape[1], -1)}  # the other tokens' outputs are not looked at
    mask = torch.full((ids.shape[1], ids.shape[1]), float("-inf")).triu(1)[None, None]
    tables = model.model.rotary_emb(x, positions)
    x = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=tables, **shared)
    x, chosen = x if isinstance(x, tuple) else (x, None)
    return model.lm_head(own.norm(x[:, -1:])), chosen


def draft_modules(name: str) -> tuple[Anatomy, DraftModules]:
    """A tiny model and its draft module, with weights of its own."""
    # The last layer of the tiny GLM has no indexer; its draft module must have one nevertheless.
    anatomy = Anatomy(randomised(build(tiny(name))))
    own = DraftModules.like(anatomy, torch.float32)
    own.layer = copy.deepcopy(own.layer)
    for module in (own.projection, own.layer, own.norm):
        randomised(module)
        for tensor in module.state_dict().values():
            tensor.mul_(1.1)
    return anatomy, own


def step_of(at: ParallelContext, start: int, queries: int, total: int, caches: dict[Any, torch.Tensor]) -> Step:
    """A step of ``queries`` tokens from place ``start`` on, in a cache that has room for ``total``."""
    blocks = blocks_per_request(total, BLOCK, at.dcp)
    table = torch.arange(BATCH * blocks).view(BATCH, blocks)
    positions = torch.arange(start, start + queries).expand(BATCH, -1)
    slots = slot_mapping(positions, table, block_size=BLOCK, dcp=at.dcp, rank=at.dcp_rank, interleave=1)
    rows = table.to(torch.int32)
    if at.dcp > 1:
        rows = rows.repeat_interleave(queries, 0)
    return Step(Phase.DECODE, positions, start + queries, rows, slots, caches)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("deepseek_v3", layout) for layout in ({}, {"tp": 2}, {"tp": 4, "dcp": 4}, {"tp": 2, "dp": 2, "ep": 4})),
        *(("glm_moe_dsa", layout) for layout in ({}, {"tp": 4, "dcp": 4})),
    ],
)
def test_draft_pass(name: str, layout: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = ParallelContext(**layout)
    with torch.inference_mode():
        anatomy, own = draft_modules(name)
        generator = torch.Generator().manual_seed(5)
        ids = torch.randint(3, 128, (ctx.dp, BATCH, QUERY), generator=generator)
        hidden = torch.randn(ctx.dp, BATCH, QUERY, 64, generator=generator)
        wanted = [reference(anatomy, own, ids[d], hidden[d])[0] for d in range(ctx.dp)]

    def work(at: ParallelContext) -> tuple[torch.Tensor, torch.Tensor]:
        program = DraftProgram(anatomy, at, own)
        caches = program.caches(BATCH * blocks_per_request(QUERY, BLOCK, at.dcp), BLOCK, torch.float32)
        step = step_of(at, 0, QUERY, QUERY, caches)
        # The draft layer has caches of its own, after those of the model.
        assert list(step.kv_caches) == ([3] if name == "deepseek_v3" else [6, "indexer.6"])
        return program.draft(ids[at.dp_rank], hidden[at.dp_rank], step)

    for rank, (drafted, logits) in enumerate(run_ranks(monkeypatch, ctx, work)):
        expected = wanted[ctx.at(rank).dp_rank]
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=3e-5)
        assert torch.equal(drafted, expected.argmax(-1))


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"tp": 4, "dcp": 4}])
def test_later_pass_reuses_the_choice(layout: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A second pass over one token attends to what the last token of the first pass chose (five of seven tokens).

    Its own key is in no indexer's cache then, its latent is in the main one.
    """
    ctx, total = ParallelContext(**layout), QUERY + 1
    with torch.inference_mode():
        anatomy, own = draft_modules("glm_moe_dsa")
        generator = torch.Generator().manual_seed(5)
        ids = torch.randint(3, 128, (BATCH, total), generator=generator)
        hidden = torch.randn(BATCH, total, 64, generator=generator)
        _, chosen = reference(anatomy, own, ids[:, :QUERY], hidden[:, :QUERY])
        choice = chosen[:, -1:]
        assert choice.shape == (BATCH, 1, 5)
        wanted, _ = reference(anatomy, own, ids, hidden, choice)
        anew, _ = reference(anatomy, own, ids, hidden)

    def work(at: ParallelContext) -> tuple[torch.Tensor, torch.Tensor]:
        program = DraftProgram(anatomy, at, own)
        caches = program.caches(BATCH * blocks_per_request(total, BLOCK, at.dcp), BLOCK, torch.float32)
        program.draft(ids[:, :QUERY], hidden[:, :QUERY], step_of(at, 0, QUERY, total, caches))
        keys = caches["indexer.6"].clone()
        step = step_of(at, QUERY, 1, total, caches)
        _, logits = program.draft(ids[:, QUERY:], hidden[:, QUERY:], step, choice.to(torch.int32))
        return logits, caches["indexer.6"] - keys

    for logits, written in run_ranks(monkeypatch, ctx, work):
        torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=3e-5)
        assert (logits - anew).abs().max() > 1e-2
        assert not written.any()
