"""No parameter is lost or made up: the ranks together hold Transformers' parameters, and what is copied is listed."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import pytest
import torch
from copies import parameter_copies
from embedded import ALL, DRAFTING, MODELS, Traces, cases, examples, layouts, params_of
from hf_reference import reference
from hypothesis import given
from hypothesis import strategies as st

from tensor_cast.ir.program import Layout
from tensor_cast.ir.record import Role
from tensor_cast.layers.context import ParallelContext
from tensor_cast.layers.sharding import Sharder
from tensor_cast.model_catalog import load_model_config
from tensor_cast.model_config import ParallelConfig
from tensor_cast.tracer.trace import ModelTracer
from tensor_cast.tracer.whole import context_of


def one(phase: str = "decode") -> Layout:
    return next(x for x in layouts(MODELS[0]) if x.parallel == ParallelConfig() and x.phase == phase)


@pytest.mark.parametrize("name", ALL)
def test_one_rank_holds_the_checkpoint(name: str, traces: Traces) -> None:
    """Names and shapes are Transformers'; a tied parameter is there under both names and counted once."""
    params, wanted = params_of(traces.of(name, one())), reference(name)
    assert {n: p.shape for n, p in params.items()} == wanted.shapes
    assert {n for n, p in params.items() if p.tied_to} == set(wanted.tied)
    counted = sum(p.numel for p in params.values() if not p.tied_to)
    assert counted == sum(math.prod(s) for n, s in wanted.shapes.items() if n not in wanted.tied)


@given(case=cases(ALL, free=True))
@examples(60)
def test_ranks_hold_the_checkpoint_and_the_listed_copies(case: tuple[str, Layout], traces: Traces) -> None:
    """Rank 0 holds the largest shard: its elements times the ranks, and for uneven experts its experts times those."""
    name, layout = case
    model, wanted = load_model_config(name), reference(name).shapes
    params = params_of(traces.of(name, layout))
    assert set(params) == set(wanted)
    ranks = layout.parallel.tensor_parallel_size * layout.parallel.data_parallel_size
    ep = layout.parallel.expert_parallel_size
    for key, param in params.items():
        whole = math.prod(wanted[key])
        total = Fraction(param.numel * ranks)
        if ".experts." in key:
            assert param.shape[0] == -(-model.num_experts // ep), key
            total = total / param.shape[0] * Fraction(model.num_experts, ep)
        assert total == whole * parameter_copies(key, model, layout), (key, layout)


@given(name=st.sampled_from(DRAFTING), tokens=st.integers(1, 4))
@examples(6)
def test_draft_module(name: str, tokens: int, traces: Traces) -> None:
    """One more layer like the last, its projection 2H -> H and three norms; however many tokens it drafts."""
    model = load_model_config(name)
    layout = one()
    base = params_of(traces.of(name, layout))
    more = params_of(traces.of(name, Layout(layout.parallel, layout.phase, "vllm", layout.block_size, tokens)))
    path, last, h = f"model.layers.{model.num_hidden_layers}", model.num_hidden_layers - 1, model.hidden_size
    added = {key: param.shape for key, param in more.items() if key not in base}
    like = {key: p.shape for key, p in base.items() if key.startswith(f"model.layers.{last}.")}
    own = {f"{path}.eh_proj.weight": (h, 2 * h)}
    own |= {f"{path}.{norm}.weight": (h,) for norm in ("enorm", "hnorm", "shared_head.norm")}
    assert added == {key.replace(f".{last}.", f".{model.num_hidden_layers}.", 1): s for key, s in like.items()} | own


@pytest.fixture(scope="module")
def mixed() -> ModelTracer:
    return ModelTracer(load_model_config("deepseek-ai/DeepSeek-V3"))


@given(layout=st.sampled_from(layouts("deepseek-ai/DeepSeek-V3", phase=None, max_tp=8, free=True)))
@examples(4)
def test_every_rank_counted(layout: Layout, mixed: ModelTracer) -> None:
    """Each rank cut for itself: experts that do not divide, and all else, add up over the real ranks."""
    ctx = context_of(layout)
    totals: Counter[str] = Counter()
    experts: list[int] = []
    with torch.inference_mode(), mixed.inputs.space.mode:
        for rank in range(ctx.tp * ctx.dp):
            params = _cut(mixed, ctx.at(rank))
            totals.update({name: math.prod(shape) for name, shape in params.items()})
            experts.append(next(s[0] for n, s in params.items() if n.endswith("experts.down_proj")))
    assert sum(experts) == mixed.config.num_experts * ctx.moe_tp * ctx.moe_dp
    assert max(experts) - min(experts) <= 1
    shapes = reference("deepseek-ai/DeepSeek-V3").shapes
    for name, total in totals.items():
        assert total == math.prod(shapes[name]) * parameter_copies(name, mixed.config, layout), name


def _cut(tracer: ModelTracer, ctx: ParallelContext) -> dict[str, tuple[int, ...]]:
    """Local shapes of the parameters in the regions of one layer of each kind, of the embedding and the head."""
    anatomy = tracer.anatomy
    sharder = Sharder(anatomy.plan, ctx, anatomy.names)
    regions = [anatomy.embedding, anatomy.head, *(r for i in tracer.groups for r in anatomy.layer_regions(i))]
    for region in regions:
        module = sharder.region(region.module, region.path)
        for name, tensor in module.state_dict().items():
            assert tuple(tensor.shape) == sharder.params[f"{region.path}.{name}"].shape
    assert any(p.role is Role.ROUTER for p in sharder.params.values())
    return {name: param.shape for name, param in sharder.params.items()}
