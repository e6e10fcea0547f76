"""The draft module computes what DeepSeek-V3's report says, on one rank and on several."""

from __future__ import annotations

import copy

import pytest
import torch
from rank_threads import run_ranks
from test_layers_equal_transformers import randomised
from tracer_models import tiny

from tensor_cast.ir.record import Phase
from tensor_cast.layers.context import ParallelContext, Step
from tensor_cast.layers.mtp import DraftModules
from tensor_cast.layers.program import Anatomy, DraftProgram
from tensor_cast.ops.kv_layout import blocks_per_request, slot_mapping
from tensor_cast.tracer.builder import build

BATCH, QUERY, BLOCK = 2, 7, 4


def reference(anatomy: Anatomy, own: DraftModules, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Equations 21 to 24 of the report, with Transformers' own layer and eager attention."""
    model = anatomy.model
    joined = torch.cat([own.projection.enorm(model.model.embed_tokens(ids)), own.projection.hnorm(hidden)], dim=-1)
    x = joined @ own.projection.eh_proj.weight.T
    positions = torch.arange(ids.shape[1])[None]
    layer = copy.deepcopy(own.layer)
    for module in layer.modules():
        if hasattr(module, "config"):
            module.config = copy.deepcopy(module.config)
            module.config._attn_implementation = "eager"
            module.config._experts_implementation = "eager"
    mask = torch.full((ids.shape[1], ids.shape[1]), float("-inf")).triu(1)[None, None]
    tables = model.model.rotary_emb(x, positions)
    x = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=tables)
    x = x[0] if isinstance(x, tuple) else x
    return model.lm_head(own.norm(x[:, -1:]))


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
        # The last layer of the tiny GLM has no indexer; its draft module must have one nevertheless.
        anatomy = Anatomy(randomised(build(tiny(name))))
        own = DraftModules.like(anatomy, torch.float32)
        own.layer = copy.deepcopy(own.layer)  # weights of its own
        for module in (own.projection, own.layer, own.norm):
            randomised(module)
            for tensor in module.state_dict().values():
                tensor.mul_(1.1)
        generator = torch.Generator().manual_seed(5)
        ids = torch.randint(3, 128, (ctx.dp, BATCH, QUERY), generator=generator)
        hidden = torch.randn(ctx.dp, BATCH, QUERY, 64, generator=generator)
        wanted = [reference(anatomy, own, ids[d], hidden[d]) for d in range(ctx.dp)]

    def work(at: ParallelContext) -> tuple[torch.Tensor, torch.Tensor]:
        program = DraftProgram(anatomy, at, own)
        blocks = blocks_per_request(QUERY, BLOCK, at.dcp)
        table = torch.arange(BATCH * blocks).view(BATCH, blocks)
        positions = torch.arange(QUERY).expand(BATCH, -1)
        slots = slot_mapping(positions, table, block_size=BLOCK, dcp=at.dcp, rank=at.dcp_rank, interleave=1)
        rows = table.to(torch.int32)
        if at.dcp > 1:
            rows = rows.repeat_interleave(QUERY, 0)
        step = Step(Phase.DECODE, positions, QUERY, rows, slots, program.caches(BATCH * blocks, BLOCK, torch.float32))
        # The draft layer has caches of its own, after those of the model.
        assert list(step.kv_caches) == ([3] if name == "deepseek_v3" else [6, "indexer.6"])
        return program.draft(ids[at.dp_rank], hidden[at.dp_rank], step)

    for rank, (drafted, logits) in enumerate(run_ranks(monkeypatch, ctx, work)):
        expected = wanted[ctx.at(rank).dp_rank]
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=3e-5)
        assert torch.equal(drafted, expected.argmax(-1))
