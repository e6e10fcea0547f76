"""Stages run one after the other equal Transformers' whole model, on one rank a stage and on several."""

from __future__ import annotations

import copy

import pytest
import torch
from rank_threads import run_ranks
from test_layers_equal_transformers import randomised
from tracer_models import TINY, tiny
from transformers import AutoModelForCausalLM, DynamicCache

from tensor_cast.errors import LegalityError
from tensor_cast.ir.record import Phase
from tensor_cast.layers.boundary import Boundary
from tensor_cast.layers.choice_flow import ChoiceFlow, self_computing
from tensor_cast.layers.context import ParallelContext, Step
from tensor_cast.layers.program import Anatomy
from tensor_cast.layers.stage import StageProgram
from tensor_cast.ops.kv_layout import blocks_per_request, slot_mapping
from tensor_cast.pipeline_partition import DsaSplit
from tensor_cast.tracer.builder import build

BATCH, BLOCK, CHUNKS = 2, 4, (11, 3, 1)


def reference(model: torch.nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    """Logits of Transformers' own model with its own cache."""
    config = copy.deepcopy(model.config)
    config._experts_implementation = "eager"
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    theirs.config._experts_implementation = "eager"
    theirs.load_state_dict(model.state_dict())
    cache = DynamicCache(config=theirs.config)
    return [theirs(input_ids=chunk, cache=cache, use_cache=True).logits for chunk in ids.split(CHUNKS, dim=1)]


def pipeline(
    anatomy: Anatomy,
    ctx: ParallelContext,
    partition: tuple[int, ...],
    ids: torch.Tensor,
    *,
    dsa_split: DsaSplit | None = None,
) -> list[torch.Tensor]:
    """Logits of a prompt and two decode steps; the stages run in turn on the same rank, each with its own caches."""
    stages = range(len(partition))
    programs = [StageProgram(anatomy, ctx, partition, stage, dsa_split=dsa_split) for stage in stages]
    blocks = blocks_per_request(sum(CHUNKS), BLOCK, ctx.dcp)
    table = torch.randperm(BATCH * blocks, generator=torch.Generator().manual_seed(1)).view(BATCH, blocks)
    caches = [program.caches(BATCH * blocks, BLOCK, torch.float32) for program in programs]
    for program, own in zip(programs, caches, strict=True):
        assert {key for key in own if isinstance(key, int)} == set(program.layers)
    outputs, start = [], 0
    for chunk, phase in zip(ids.split(CHUNKS, dim=1), (Phase.PREFILL, Phase.DECODE, Phase.DECODE), strict=True):
        length = chunk.shape[1]
        positions = torch.arange(start, start + length).expand(BATCH, -1)
        slots = slot_mapping(positions, table, block_size=BLOCK, dcp=1, rank=0, interleave=1)
        handed: Boundary | None = None
        for program, own in zip(programs, caches, strict=True):
            step = Step(phase, positions, start + length, table.to(torch.int32), slots, own)
            tokens = chunk if program.first else torch.zeros_like(chunk)  # a later stage must not look at them
            result = program.run(tokens, step, handed)
            if isinstance(result, Boundary):
                handed = result
            else:
                outputs.append(result)
        start += length
    return outputs


MODELS = sorted(name for name in TINY if tiny(name).num_hidden_layers == 3 and "index_topk" not in TINY[name])


@pytest.mark.parametrize("name", MODELS)
def test_stages_equal_transformers(name: str) -> None:
    with torch.inference_mode():
        model = randomised(build(tiny(name)))
        ids = torch.randint(3, 128, (BATCH, sum(CHUNKS)), generator=torch.Generator().manual_seed(2))
        wanted = reference(model, ids)
        for partition in [(2, 1), (1, 1, 1)]:
            got = pipeline(Anatomy(model), ParallelContext(), partition, ids)
            for mine, theirs in zip(got, wanted, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_stages_of_two_ranks_equal_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():
        model = randomised(build(tiny(name)))
        ids = torch.randint(3, 128, (BATCH, sum(CHUNKS)), generator=torch.Generator().manual_seed(2))
        wanted = reference(model, ids)
        anatomy = Anatomy(model)
    results = run_ranks(monkeypatch, ParallelContext(tp=2), lambda at: pipeline(anatomy, at, (1, 2), ids))
    for got in results:
        for mine, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=3e-5)


def test_a_stage_holds_only_its_own_parameters() -> None:
    anatomy = Anatomy(build(tiny("llama")))
    first, middle, last = (StageProgram(anatomy, ParallelContext(), (1, 1, 1), stage) for stage in range(3))
    names = [{name for name, _ in program.model.named_parameters()} for program in (first, middle, last)]
    assert not names[0] & names[1]
    assert not names[0] & names[2]
    assert not names[1] & names[2]
    assert set.union(*names) == {name for name, _ in anatomy.model.named_parameters()}
    assert "model.embed_tokens.weight" in names[0]
    assert {"lm_head.weight", "model.norm.weight"} <= names[2]


def test_partition_must_fit() -> None:
    anatomy = Anatomy(build(tiny("llama")))
    with pytest.raises(LegalityError):
        StageProgram(anatomy, ParallelContext(), (2, 2), 0)


@pytest.mark.parametrize(
    ("partition", "split"), [((1, 5), None), ((3, 3), DsaSplit.SEND_INDICES), ((1, 2, 3), DsaSplit.SEND_INDICES)]
)
def test_sparse_attention_over_stages(partition: tuple[int, ...], split: DsaSplit | None) -> None:
    """Layers 0, 1 and 4 choose tokens. A stage that starts with another layer needs the indices sent along."""
    with torch.inference_mode():
        model = randomised(build(tiny("glm_moe_dsa")))
        ids = torch.randint(3, 128, (BATCH, sum(CHUNKS)), generator=torch.Generator().manual_seed(2))
        wanted = reference(model, ids)
        got = pipeline(Anatomy(model), ParallelContext(), partition, ids, dsa_split=split)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_layers_that_lack_indices_get_indexers() -> None:
    """Layers 2 and 3 of the second stage do; its own layer 5 shares what layer 4 chooses, as before."""
    model = self_computing(tiny("glm_moe_dsa"), (2, 4))
    assert model.indexer_layers == (True, True, True, True, True, False)
    anatomy = Anatomy(build(model))
    program = StageProgram(anatomy, ParallelContext(), (2, 4), 1)
    assert [key for key in program.caches(1, BLOCK, torch.float32) if isinstance(key, str)] == [
        "indexer.2",
        "indexer.3",
        "indexer.4",
    ]


def test_buffer_of_an_unsafe_stage() -> None:
    """Zeros at first, then what the stage's last layer left there: the choice of the step before."""
    flow = ChoiceFlow((1, 2), 1, (True, False, True), 3, DsaSplit.UNSAFE)

    def step(queries: int, length: int) -> Step:
        positions = torch.arange(length - queries, length).expand(2, -1)
        return Step(Phase.DECODE, positions, length, torch.zeros(0), torch.zeros(0))

    assert flow.incoming(None, step(2, 2)).tolist() == [[[0, 0]] * 2] * 2  # two tokens so far: rows of two
    chosen = torch.tensor([[[0, 1], [1, 0]], [[1, 0], [0, 1]]])
    assert flow.outgoing(chosen) is None
    # One token each now: rows of the buffer are tokens of the step, the second request reads the first one's.
    assert flow.incoming(None, step(1, 3)).tolist() == [[[0, 1, -1]], [[1, 0, -1]]]


def test_indices_on_the_wire_are_int32_and_as_wide_as_the_choice() -> None:
    flow = ChoiceFlow((1, 2), 0, (True, False, True), 3, DsaSplit.SEND_INDICES)
    sent = flow.outgoing(torch.tensor([[[1, 0]]], dtype=torch.int64))
    assert sent.dtype == torch.int32
    assert sent.tolist() == [[[1, 0, -1]]]
    safe = ChoiceFlow((2, 1), 0, (True, False, True), 3, DsaSplit.SEND_INDICES)
    assert safe.outgoing(torch.tensor([[[1, 0]]])) is None
