"""The program on real tensors equals Transformers' own model with its own cache: prefill, then decode steps."""

from __future__ import annotations

import copy

import pytest
import torch
from tracer_models import TINY, tiny
from transformers import AutoModelForCausalLM, DynamicCache

from tensor_cast.ir.record import Phase
from tensor_cast.layers.context import ParallelContext, Step
from tensor_cast.layers.program import Anatomy, RankProgram
from tensor_cast.ops.kv_layout import blocks_per_request, slot_mapping
from tensor_cast.tracer.builder import build

BATCH, PROMPT, STEPS, BLOCK = 2, 11, (3, 1, 2), 4


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    """Weights large enough that every part of the model matters to the result."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in name:
                tensor.copy_(1 + 0.1 * noise)
            else:
                tensor.copy_(noise * tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 0.3 * noise)
    return model


@pytest.mark.parametrize("prompt_phase", [Phase.PREFILL, Phase.DECODE])
@pytest.mark.parametrize("name", sorted(TINY))
def test_prefill_then_decode(name: str, prompt_phase: Phase) -> None:
    ours = randomised(build(tiny(name)))
    config = copy.deepcopy(ours.config)
    config._experts_implementation = "eager"
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    theirs.config._experts_implementation = "eager"
    theirs.load_state_dict(ours.state_dict())

    ctx = ParallelContext()
    program = RankProgram(Anatomy(ours), ctx)
    total = PROMPT + sum(STEPS)
    blocks = blocks_per_request(total, BLOCK, ctx.dcp)
    # Pages in a shuffled order, and one that nobody owns.
    table = 1 + torch.randperm(BATCH * blocks, generator=torch.Generator().manual_seed(1)).view(BATCH, blocks)
    caches = program.caches(BATCH * blocks + 1, BLOCK, torch.float32)
    ids = torch.randint(3, 128, (BATCH, total), generator=torch.Generator().manual_seed(2))

    cache = DynamicCache(config=theirs.config)
    start = 0
    with torch.inference_mode():
        for number, length in enumerate((PROMPT, *STEPS)):
            chunk = ids[:, start : start + length]
            positions = torch.arange(start, start + length).expand(BATCH, -1)
            expected = theirs(input_ids=chunk, cache=cache, use_cache=True).logits
            slots = slot_mapping(positions, table, block_size=BLOCK, dcp=1, rank=0, interleave=1)
            phase = prompt_phase if number == 0 else Phase.DECODE
            step = Step(phase, positions, start + length, table.to(torch.int32), slots, caches)
            sampled, logits = program(chunk, step)
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
            assert torch.equal(sampled, expected.argmax(-1))
            start += length


@pytest.mark.parametrize("name", [name for name in sorted(TINY) if "index_topk" in TINY[name]])
def test_the_choice_of_tokens_matters(name: str) -> None:
    """The tiny models choose fewer tokens than they see, and that shows: else equality would prove little of it."""
    few = randomised(build(tiny(name)))
    all_of_them = build(tiny(name, index_topk=64))
    all_of_them.load_state_dict(few.state_dict())
    ids = torch.randint(3, 128, (BATCH, PROMPT), generator=torch.Generator().manual_seed(2))
    positions = torch.arange(PROMPT).expand(BATCH, -1)
    blocks = blocks_per_request(PROMPT, BLOCK, 1)
    table = torch.arange(BATCH * blocks).view(BATCH, blocks)
    slots = slot_mapping(positions, table, block_size=BLOCK, dcp=1, rank=0, interleave=1)
    logits = []
    with torch.inference_mode():
        for model in (few, all_of_them):
            program = RankProgram(Anatomy(model), ParallelContext())
            caches = program.caches(BATCH * blocks, BLOCK, torch.float32)
            logits.append(program(ids, Step(Phase.PREFILL, positions, PROMPT, table.to(torch.int32), slots, caches))[1])
    few_tokens = tiny(name).index_topk
    torch.testing.assert_close(logits[0][:, :few_tokens], logits[1][:, :few_tokens], rtol=1e-5, atol=1e-5)
    assert (logits[0] - logits[1])[:, few_tokens:].abs().amax(-1).min() > 1e-3
