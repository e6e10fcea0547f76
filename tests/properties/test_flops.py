"""No product is lost or made up: FLOPs of the ranks are those that torch counts in Transformers' own model."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from copies import product_copies
from embedded import DRAFTING, MODELS, Traces, cases, examples, layouts, sizes
from hf_reference import BATCH, QUERY, reference
from hypothesis import given
from hypothesis import strategies as st
from products import product_flops, unsharded_decode, visible

from tensor_cast.ir.program import Layout
from tensor_cast.ir.record import Phase
from tensor_cast.model_catalog import load_model_config
from tensor_cast.model_config import AttentionKind, ModelConfig, ParallelConfig

PROMPT = {"B": BATCH, "Q": QUERY, "S": QUERY}


def whole(phase: Phase, mtp: int = 0) -> Layout:
    return Layout(ParallelConfig(), phase, "vllm", 128, mtp)


def wanted_prompt(model: ModelConfig) -> dict[str, Fraction]:
    """Transformers' FLOPs of the prompt by module: causal attention, and logits of the last token only."""
    flops = {module: Fraction(count) for module, count in reference(model).flops.items()}
    for layer, window in enumerate(model.layer_windows):
        # Eager attention multiplies whole matrices and masks afterwards.
        flops[f"model.layers.{layer}.self_attn"] *= Fraction(visible(QUERY, QUERY, window), QUERY * QUERY)
    flops["lm_head"] /= QUERY
    return flops


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_computes_what_transformers_computes(name: str, traces: Traces) -> None:
    """Every module of a fresh prompt: linears, routers and experts exactly, attention with what causality leaves."""
    found = product_flops(traces.of(name, whole(Phase.PREFILL)), PROMPT, ParallelConfig())
    assert {module: flops for (module, _), flops in found.items()} == wanted_prompt(load_model_config(name))


@given(case=cases(free=True, phase=Phase.PREFILL))
@examples(60)
def test_ranks_compute_a_prompt(case: tuple[str, Layout], traces: Traces) -> None:
    """Summed over ranks: Transformers' FLOPs, and the copies of product_copies() on top."""
    name, layout = case
    model = load_model_config(name)
    found = product_flops(traces.of(name, layout), PROMPT, layout.parallel)
    wanted = wanted_prompt(model)
    assert {module for module, _ in found} == set(wanted)
    for (module, kind), flops in found.items():
        tokens = layout.parallel.data_parallel_size if kind == "experts" else 1
        if kind == "experts" and layout.parallel.moe_data_parallel_size > 1:
            pass  # each copy sees the tokens of its own DP ranks; together they see all
        assert flops == wanted[module] * tokens * product_copies(module, kind, model, layout), (module, kind, layout)


@given(data=st.data(), case=cases(free=True, phase=Phase.DECODE))
@examples(60)
def test_ranks_compute_a_decode_step(data: st.DataObject, case: tuple[str, Layout], traces: Traces) -> None:
    """As for a prompt. Linears cost by the token; attention by the visible pairs, split over heads and keys.

    The context is a multiple of what DCP deals out at a time, so that no rank holds padding.
    """
    name, layout = case
    model, parallel = load_model_config(name), layout.parallel
    env = data.draw(sizes(Phase.DECODE))
    granule = layout.dcp * parallel.cp_kv_cache_interleave_size
    env["S"] = -(-env["S"] // granule) * granule
    found = product_flops(traces.of(name, layout), env, parallel)
    wanted: Counter[tuple[str, str]] = Counter()
    for module, flops in reference(name).flops.items():
        if module.endswith("self_attn"):
            layer = int(module.split(".")[2])
            wanted.update({(module, kind): count for kind, count in unsharded_decode(model, layer, env).items()})
        elif not (module.endswith("kv_b_proj") and model.attention is not AttentionKind.GQA):
            kind = "experts" if module.endswith(".experts") else "linear"
            tokens = env["B"] * env["Q"] * (parallel.data_parallel_size if kind == "experts" else 1)
            wanted[module, kind] = Fraction(flops * tokens, BATCH * QUERY)  # type: ignore[assignment]
    assert set(found) == set(wanted)
    for (module, kind), flops in found.items():
        copies = product_copies(module, kind, model, layout)
        assert flops == wanted[module, kind] * copies, (module, kind, layout, env)


@given(name=st.sampled_from(DRAFTING), tokens=st.integers(1, 4), batch=st.integers(1, 64), context=st.integers(8, 9999))
@examples(8)
def test_draft_tokens_cost_a_layer_and_a_head_each(
    name: str, tokens: int, batch: int, context: int, traces: Traces
) -> None:
    """k passes of the draft module: the first over the step's 1 + k tokens, the others over one token each."""
    model = load_model_config(name)
    env = {"B": batch, "Q": 1 + tokens, "S": context}
    base = product_flops(traces.of(name, whole(Phase.DECODE)), env, ParallelConfig())
    more = product_flops(traces.of(name, whole(Phase.DECODE, tokens)), env, ParallelConfig())
    added = Counter(more)
    added.subtract(base)
    last, draft = f"model.layers.{model.num_hidden_layers - 1}.", f"model.layers.{model.num_hidden_layers}."
    passes = 1 + tokens + (tokens - 1)  # query tokens of all passes
    for (module, kind), flops in base.items():
        if module.startswith(last) and kind != "attention":
            assert added[module.replace(last, draft), kind] == Fraction(flops * passes, 1 + tokens)
    one = unsharded_decode(model, -1, {"B": batch, "Q": 1, "S": context})["attention"]
    first = unsharded_decode(model, -1, env)["attention"]
    assert added[f"{draft}self_attn", "attention"] == first + (tokens - 1) * one
    assert added["lm_head", "linear"] == Fraction(base["lm_head", "linear"] * tokens, 1 + tokens)
    assert added[f"{draft}eh_proj", "linear"] == 2 * batch * passes * 2 * model.hidden_size**2


def test_layouts_cover_copied_kv_heads() -> None:
    """More ranks than KV heads, and fewer, are among what is drawn."""
    for name in MODELS:
        model = load_model_config(name)
        if model.attention is AttentionKind.GQA:
            sizes_of_tp = {layout.parallel.tensor_parallel_size for layout in layouts(name)}
            assert any(tp > model.num_key_value_heads for tp in sizes_of_tp)
            assert any(1 < tp <= model.num_key_value_heads for tp in sizes_of_tp)
