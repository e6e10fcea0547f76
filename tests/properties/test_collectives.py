"""What crosses ranks: bytes of each algorithm as counted by carrying it out, and of each layer as written by hand."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from embedded import Traces, cases, examples, runs, sizes
from hypothesis import given
from hypothesis import strategies as st

from tensor_cast.device.catalog import load_device
from tensor_cast.device.profile import DeviceProfile
from tensor_cast.ir.program import Layout
from tensor_cast.ir.record import Phase
from tensor_cast.model_catalog import load_model_config
from tensor_cast.model_config import AttentionKind
from tensor_cast.performance_model.comm_analytic import collective_seconds, wire_bytes

# -- one level: the algorithms carried out --------------------------------------------------------------------------


def ring_reduce_scatter(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """data [rank, rank, chunk] -> (sum of chunk r on rank r, elements that each rank sent)."""
    n = len(data)
    held, sent = data.copy(), np.zeros(n)
    for step in range(n - 1):
        moving = [(rank, (rank - step - 1) % n, held[rank, (rank - step - 1) % n].copy()) for rank in range(n)]
        for rank, chunk, values in moving:
            held[(rank + 1) % n, chunk] += values
            sent[rank] += values.size
    return np.stack([held[rank, rank] for rank in range(n)]), sent


def ring_all_gather(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """data [rank, chunk] -> (everything on every rank, elements that each rank sent)."""
    n = len(data)
    held = np.full((n, *data.shape), np.nan)
    held[range(n), range(n)] = data
    sent = np.zeros(n)
    for step in range(n - 1):
        moving = [(rank, (rank - step) % n, held[rank, (rank - step) % n].copy()) for rank in range(n)]
        for rank, chunk, values in moving:
            held[(rank + 1) % n, chunk] = values
            sent[rank] += values.size
    return held, sent


@given(ranks=st.integers(2, 9), chunk=st.integers(1, 5), seed=st.integers(0, 99))
@examples(40)
def test_bytes_of_the_algorithms(ranks: int, chunk: int, seed: int) -> None:
    """Elements of 8 bytes really sent from neighbour to neighbour, results checked, against the formulas."""
    data = np.random.default_rng(seed).normal(size=(ranks, ranks, chunk))
    whole = ranks * chunk * 8
    scattered, sent = ring_reduce_scatter(data)
    np.testing.assert_allclose(scattered, data.sum(0))
    assert sent * 8 == pytest.approx(wire_bytes("reduce_scatter", whole, ranks))
    gathered, sent_back = ring_all_gather(scattered)
    np.testing.assert_allclose(gathered, np.broadcast_to(data.sum(0), gathered.shape))
    assert sent_back * 8 == pytest.approx(wire_bytes("all_gather", chunk * 8, ranks))
    assert (sent + sent_back) * 8 == pytest.approx(wire_bytes("all_reduce", whole, ranks))
    # all_to_all: every slice but one's own leaves.
    leaving = [sum(data[rank, to].size for to in range(ranks) if to != rank) * 8 for rank in range(ranks)]
    assert leaving == pytest.approx([wire_bytes("all_to_all", whole, ranks)] * ranks)


# -- levels: bytes per tier -----------------------------------------------------------------------------------------


def counting_device(node: int, tier: int) -> DeviceProfile:
    """Two tiers of which one moves a byte per second and the other anything at once: seconds are bytes."""
    base: dict[str, Any] = load_device("H100_SXM").model_dump()
    fit = {"alpha_s": 0, "efficiency": 1, "source": "test"}
    speeds = [1e300, 1e300]
    speeds[tier] = 1.0
    base["tiers"] = [
        {"name": "node", "size": node, "bandwidth": {"value": speeds[0], "source": "t"}, "latency_s": 0},
        {"name": "net", "size": None, "bandwidth": {"value": speeds[1], "source": "t"}, "latency_s": 0},
    ]
    base["collectives"] = dict.fromkeys(base["collectives"], fit)
    return DeviceProfile.model_validate(base)


@given(node=st.sampled_from((2, 4, 8)), nodes=st.integers(1, 5), nbytes=st.integers(1, 10**9))
@examples(40)
def test_bytes_per_level(node: int, nodes: int, nbytes: int) -> None:
    """A group over nodes: n ranks of a node share what leaves it; by hand for every kind."""
    n, m, b = node, nodes, Fraction(nbytes)
    wanted = {
        "all_reduce": (2 * b * (n - 1) / n, 2 * b / n * (m - 1) / m),
        "reduce_scatter": (b * (n - 1) / n, b / n * (m - 1) / m),
        "all_gather": ((n - 1) * m * b, (m - 1) * b),
        "all_to_all": (b * (n - 1) / n, b * (m - 1) / m),
    }
    for kind, tiers in wanted.items():
        for tier, expected in enumerate(tiers):
            seconds = collective_seconds(counting_device(node, tier), kind, float(nbytes), range(n * m))
            assert float(seconds) == pytest.approx(float(expected), rel=1e-9), (kind, tier)


# -- layers: the collectives of a trace -----------------------------------------------------------------------------


def wanted_of_attention(name: str, layout: Layout, tokens: int) -> list[tuple[str, str, int]]:
    """(op, axis, bytes) of one attention layer of one rank, from the papers: RFC 2.1.4.3 and the engines' sources."""
    model, dcp, tp = load_model_config(name), layout.dcp, layout.parallel.tensor_parallel_size
    latent = model.attention is not AttentionKind.GQA
    heads = model.num_attention_heads // tp
    out: list[tuple[str, str, int]] = []
    if dcp > 1:
        query = model.kv_lora_rank + model.qk_rope_head_dim if latent else model.head_dim
        out.append(("all_gather_into_tensor", "dcp", tokens * heads * query * 2))
        width = model.kv_lora_rank if latent and layout.dcp_semantics != "rfc" else model.v_head_dim
        if layout.dcp_semantics == "vllm":
            out.append(("all_gather_into_tensor", "dcp", tokens * heads * dcp * 4))
            out.append(("reduce_scatter_tensor", "dcp", tokens * heads * dcp * width * 2))
        else:
            out.append(("all_to_all_single", "dcp", tokens * heads * dcp * (width + 1) * 4))
    if tp > 1:
        out.append(("all_reduce", "tp", tokens * model.hidden_size * 2))
    return out


def wanted_of_ffn(name: str, layout: Layout, layer: int, tokens: int) -> list[tuple[str, str, int]]:
    """One all_reduce; with experts shared by DP ranks their tokens, ids and weights are gathered, the sum scattered."""
    model, parallel = load_model_config(name), layout.parallel
    dispatch = parallel.data_parallel_size // parallel.moe_data_parallel_size
    hidden = tokens * model.hidden_size * 2
    out: list[tuple[str, str, int]] = []
    if model.moe_layers[layer] and dispatch > 1:
        out += [("all_gather_into_tensor", "dp", hidden), ("reduce_scatter_tensor", "dp", hidden * dispatch)]
    if parallel.tensor_parallel_size > 1:
        out.append(("all_reduce", "tp", hidden))
    return out


@given(data=st.data(), case=cases(free=True))
@examples(120)
def test_collectives_of_every_layer(data: st.DataObject, case: tuple[str, Layout], traces: Traces) -> None:
    """Kind, axis and local bytes of every collective: embedding, each layer, head; nothing else crosses ranks."""
    name, layout = case
    model, tp = load_model_config(name), layout.parallel.tensor_parallel_size
    env = data.draw(sizes(layout.phase))
    tokens = env["B"] * env["Q"]
    found: dict[int | None, Counter[tuple[str, str, int]]] = {}
    routing = 0
    for segment, layer in runs(traces.of(name, layout)):
        for op in segment.part.ops:
            if not op.is_collective:
                continue
            nbytes = op.collective_bytes(env)
            if op.axis == "dp" and nbytes < tokens * model.hidden_size:
                routing += 1  # ids and weights of the chosen experts: k numbers a token
                assert nbytes in {tokens * model.num_experts_per_tok * width for width in (2, 4, 8)}
                continue
            key = (op.name.removeprefix("_c10d_functional."), str(op.axis), int(nbytes))
            found.setdefault(layer, Counter())[key] += 1
    dispatch = layout.parallel.data_parallel_size // layout.parallel.moe_data_parallel_size
    assert routing == (2 * sum(model.moe_layers) if dispatch > 1 else 0)
    for layer in range(model.num_hidden_layers):
        wanted = wanted_of_attention(name, layout, tokens) + wanted_of_ffn(name, layout, layer, tokens)
        assert found.pop(layer, Counter()) == Counter(wanted), (layer, layout, env)
    sampled = env["B"] if layout.phase is Phase.PREFILL else tokens
    logits = sampled * (-(-model.vocab_size // 64) * 64) // tp * 2
    outside = [("all_reduce", "tp", tokens * model.hidden_size * 2), ("all_gather_into_tensor", "tp", logits)]
    assert found == ({None: Counter(outside)} if tp > 1 else {})
