"""A program cut for several ranks gives what the whole model gives, under every axis and DCP semantics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_threads import run_ranks
from test_layers_equal_transformers import randomised
from tracer_models import tiny

from tensor_cast.ir.record import Phase
from tensor_cast.layers.context import ParallelContext, Step
from tensor_cast.layers.program import Anatomy, RankProgram
from tensor_cast.ops.kv_layout import blocks_per_request, slot_mapping
from tensor_cast.tracer.builder import build

BATCH, BLOCK, CHUNKS = 2, 4, (11, 3, 1)

# fmt: off
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {}, {"tp": 2}),
    ("qwen3", {"vocab_size": 130, "num_key_value_heads": 2}, {"tp": 4}),   # KV heads replicated, padded, tied
    ("gemma2", {"num_key_value_heads": 2}, {"tp": 4}),
    ("gpt_oss", {"num_key_value_heads": 2}, {"tp": 4}),
    ("deepseek_v3", {}, {"tp": 4}),
    ("mixtral", {}, {"tp": 2, "ep": 2}),
    ("qwen3_moe", {"num_experts": 7}, {"tp": 4, "ep": 4}),                 # experts that do not divide
    ("qwen3_moe", {}, {"tp": 2, "dp": 2}),
    ("deepseek_v3", {}, {"tp": 2, "dp": 2, "ep": 4}),
    ("gpt_oss", {}, {"tp": 2, "dp": 2, "ep": 2}),
    ("gpt_oss", {}, {"tp": 1, "dp": 2}),
    ("mixtral", {}, {"tp": 2, "dp": 2, "moe_dp": 2}),
    ("llama", {"num_key_value_heads": 4}, {"tp": 4, "dcp": 4, "dcp_semantics": "rfc"}),
    ("llama", {"num_key_value_heads": 8}, {"tp": 4, "dcp": 2, "dcp_semantics": "rfc"}),
    ("deepseek_v32", {}, {"tp": 4}),
    ("glm_moe_dsa", {}, {"tp": 2, "dp": 2, "ep": 4}),
    *(
        (name, {}, {"tp": 4, "dcp": dcp, "dcp_semantics": semantics, "interleave": interleave})
        for name in ("deepseek_v32", "glm_moe_dsa")
        for semantics, dcp, interleave in (("vllm", 2, 1), ("vllm", 4, 2), ("vllm-ascend", 4, 1))
    ),
    *(
        (name, {} if name == "deepseek_v3" else {"num_key_value_heads": 2},
         {"tp": 4, "dcp": dcp, "dcp_semantics": semantics, "interleave": interleave})
        for semantics in ("vllm-ascend", "vllm", "rfc")
        for name, dcp, interleave in (("llama", 2, 1), ("gpt_oss", 2, 2), ("gemma2", 2, 1),
                                      ("deepseek_v3", 4, 1), ("deepseek_v3", 2, 2))
    ),
]
# fmt: on


def run(anatomy: Anatomy, ctx: ParallelContext, ids: torch.Tensor, phases: list[Phase]) -> list[torch.Tensor]:
    """Logits of a prompt and two decode steps on one rank, through a paged cache with shuffled pages."""
    program = RankProgram(anatomy, ctx)
    blocks = blocks_per_request(sum(CHUNKS), BLOCK, ctx.dcp)
    table = 1 + torch.randperm(BATCH * blocks, generator=torch.Generator().manual_seed(1)).view(BATCH, blocks)
    caches = program.caches(BATCH * blocks + 1, BLOCK, torch.float32)
    outputs, start = [], 0
    for length, phase in zip(CHUNKS, phases, strict=True):
        positions = torch.arange(start, start + length).expand(BATCH, -1)
        slots = slot_mapping(
            positions, table, block_size=BLOCK, dcp=ctx.dcp, rank=ctx.dcp_rank, interleave=ctx.interleave
        )
        rows = table.to(torch.int32)
        if ctx.dcp > 1:
            rows = rows.repeat_interleave(length, 0)
        step = Step(phase, positions, start + length, rows, slots, caches)
        outputs.append(program(ids[:, start : start + length], step)[1])
        start += length
    return outputs


@pytest.mark.parametrize("case", CASES, ids=[f"{n}-{'-'.join(map(str, kw.values()))}" for n, _, kw in CASES])
def test_ranks_equal_whole(case: tuple[str, dict[str, Any], dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    name, changes, layout = case
    ctx = ParallelContext(**layout)
    with torch.inference_mode():
        anatomy = Anatomy(randomised(build(tiny(name, **changes))))
        generator = torch.Generator().manual_seed(2)
        ids = torch.randint(3, 128, (ctx.dp, BATCH, sum(CHUNKS)), generator=generator)
        whole_phases = [Phase.PREFILL, Phase.DECODE, Phase.DECODE]
        wanted = [run(anatomy, ParallelContext(), ids[d], whole_phases) for d in range(ctx.dp)]
    # A prefill step runs without DCP; here the prompt goes through as one long verification step instead.
    phases = whole_phases if ctx.dcp == 1 else [Phase.DECODE] * 3
    results = run_ranks(monkeypatch, ctx, lambda at: run(anatomy, at, ids[at.dp_rank], phases))
    for rank, got in enumerate(results):
        for mine, theirs in zip(got, wanted[ctx.at(rank).dp_rank], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=3e-5)


def test_cutting_leaves_the_model_whole() -> None:
    model = randomised(build(tiny("qwen3")))
    before = {name: (tensor.shape, tensor.sum().item()) for name, tensor in model.state_dict().items()}
    RankProgram(Anatomy(model), ParallelContext(tp=2, rank=1))
    assert {name: (tensor.shape, tensor.sum().item()) for name, tensor in model.state_dict().items()} == before
    assert not any("attention_core" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gpt_oss", "mixtral"])
def test_shards_add_up_to_the_parameter(name: str) -> None:
    """Every element of a split parameter is on exactly as many ranks as the layout says; nothing is lost."""
    model = build(tiny(name, vocab_size=130))
    with torch.no_grad():
        for number, tensor in enumerate(model.state_dict().values()):
            tensor.copy_((torch.arange(tensor.numel()) + 1 + number).view(tensor.shape))
    anatomy = Anatomy(model)
    layout = ParallelContext(tp=4, ep=2 if name != "llama" else 1)
    full = dict(model.state_dict())
    seen: dict[str, list[torch.Tensor]] = {}
    for rank in range(4):
        program = RankProgram(anatomy, layout.at(rank))
        for key, tensor in program.model.state_dict().items():
            if rank == 0 and key in program.sharder.params:
                assert tuple(tensor.shape) == program.sharder.params[key].shape
            seen.setdefault(key, []).append(tensor)
    specs = program.sharder.params
    for key, pieces in seen.items():
        ways = 1
        for _, _, count in specs[key].splits if key in specs else ():
            ways *= count
        total = sum(piece.double().sum().item() for piece in pieces)
        if key.endswith("bias") and len(pieces) < 4:
            continue  # a row-parallel bias lives on one rank
        assert total == pytest.approx(full[key].double().sum().item() * 4 / ways), key
