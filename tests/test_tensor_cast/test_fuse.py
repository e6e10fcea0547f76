"""Fusion: what merges, what a merged op moves, and that no region is left and entered again."""

from __future__ import annotations

import networkx as nx
from hypothesis import given, settings
from hypothesis import strategies as st

from tensor_cast.ir.expr import symbol
from tensor_cast.ir.fuse import FUSED, fuse, is_fusable
from tensor_cast.ir.pack import PACKED_LINEAR, pack
from tensor_cast.ir.record import Kind, OpRecord, Part, Scope, TensorSpec
from tensor_cast.performance_model.base import COSTS, DimTable

B = symbol("B")
ROW = TensorSpec((B, 64), "bfloat16")
WEIGHT = TensorSpec((64, 64), "bfloat16", Kind.WEIGHT, "w")


def op(name: str, inputs: list[int], outputs: list[int], spec: TensorSpec = ROW, **more: object) -> OpRecord:
    specs = tuple(WEIGHT if i >= 1000 else spec for i in inputs)
    return OpRecord(name, "m", specs, (spec,) * len(outputs), tuple(inputs), tuple(outputs), **more)  # type: ignore[arg-type]


def part(*ops: OpRecord, inputs: tuple[int, ...] = (0,), outputs: tuple[int, ...] = ()) -> Part:
    return Part("test", ops, (), inputs, outputs)


def names(p: Part) -> list[str]:
    return [o.name for o in p.ops]


def moved(p: Part, batch: int = 5) -> float:
    table = DimTable({"B": batch, "Q": 1, "S": 1})
    return float(sum(COSTS.get(o.name)(table.op(o)).nbytes for o in p.ops))


def test_a_chain_becomes_one_kernel_that_reads_and_writes_once() -> None:
    p = part(op("aten.pow", [0], [1]), op("aten.mul", [0, 1], [2]), op("aten.silu", [2], [3]), outputs=(3,))
    fused = fuse(p)
    assert names(fused) == [FUSED]
    assert fused.ops[0].attr("ops") == ("aten.pow", "aten.mul", "aten.silu")
    assert moved(fused) == 2 * (5 * 64 * 2)
    assert fused.ops[0].attr("flops") == B * 64 * (8 + 1 + 8)


def test_values_used_outside_are_written() -> None:
    """Residual addition and norm: the sum leaves and so does the normed value."""
    p = part(
        op("aten.add", [0, 1], [2]),
        op("aten.rms_norm", [2], [3]),
        op("aten.linear", [3, 1000], [4]),
        inputs=(0, 1),
        outputs=(2, 4),
    )
    fused = fuse(p)
    assert names(fused) == [FUSED, "aten.linear"]
    assert fused.ops[0].output_ids == (2, 3)
    assert moved(fuse(part(*p.ops[:2], inputs=(0, 1), outputs=(2, 3)))) == 4 * (5 * 64 * 2)


def test_a_product_in_between_separates() -> None:
    """0 -> relu -> linear -> add with relu's output: merging relu and add would go around the product."""
    p = part(op("aten.relu", [0], [1]), op("aten.linear", [1, 1000], [2]), op("aten.add", [1, 2], [3]), outputs=(3,))
    assert names(fuse(p)) == ["aten.relu", "aten.linear", "aten.add"]


def test_halves_of_a_value_add_up_to_the_whole() -> None:
    """silu(gate) * up where both are views of one product's output."""
    whole, half = TensorSpec((B, 128), "bfloat16"), TensorSpec((B, 64), "bfloat16")
    p = part(
        OpRecord("aten.linear", "m", (ROW, WEIGHT), (whole,), (0, 1000), (1,)),
        OpRecord("aten.silu", "m", (half,), (half,), (1,), (2,)),
        OpRecord("aten.mul", "m", (half, half), (half,), (2, 1), (3,)),
        outputs=(3,),
    )
    gate = fuse(p).ops[1]
    assert [s.shape for s in gate.inputs] == [(B, 128)]


def test_only_reductions_of_the_last_dimension_merge() -> None:
    over_rows = OpRecord("aten.sum", "m", (ROW,), (TensorSpec((64,), "bfloat16"),), (0,), (1,))
    over_columns = OpRecord("aten.sum", "m", (ROW,), (TensorSpec((B,), "bfloat16"),), (0,), (1,))
    kept = OpRecord("aten.mean", "m", (ROW,), (TensorSpec((B, 1), "bfloat16"),), (0,), (1,))
    assert not is_fusable(over_rows)
    assert is_fusable(over_columns)
    assert is_fusable(kept)


def test_long_orderings_and_scopes_separate() -> None:
    logits = TensorSpec((B, 150_000), "float32")
    assert not is_fusable(OpRecord("aten.topk", "m", (logits,), (ROW,), (0,), (1,)))
    experts = TensorSpec((B, 256), "float32")
    assert is_fusable(OpRecord("aten.topk", "m", (experts,), (ROW,), (0,), (1,)))
    p = part(op("aten.relu", [0], [1]), op("aten.relu", [1], [2], scope=Scope.SEQUENCE), outputs=(2,))
    assert names(fuse(p)) == ["aten.relu", "aten.relu"]


def test_in_place_update_comes_after_those_who_read_the_old_value() -> None:
    p = part(
        op("aten.linear", [0, 1000], [1]),
        op("aten.relu", [0], [2]),
        op("aten.add_", [0, 2], [0]),
        op("aten.linear", [0, 1001], [3]),
        outputs=(1, 3),
    )
    fused = fuse(p)
    assert names(fused) == ["aten.linear", FUSED, "aten.linear"]
    assert fused.ops[1].output_ids == (0,)


def test_siblings_that_share_a_table_merge() -> None:
    """The rotation of q and of k by one table of angles is one kernel, whoever made q and k."""
    p = part(
        op("aten.linear", [0, 1000], [1]),
        op("aten.linear", [0, 1001], [2]),
        op("aten.mul", [1, 9], [3]),
        op("aten.mul", [2, 9], [4]),
        op("tensor_cast.attention", [3, 4, 4], [5]),
        inputs=(0, 9),
        outputs=(5,),
    )
    assert names(fuse(p)) == ["aten.linear", "aten.linear", FUSED, "tensor_cast.attention"]


def test_look_up_in_a_region_reads_rows_not_the_table() -> None:
    table = TensorSpec((100_000, 64), "bfloat16")
    ids = TensorSpec((B,), "int64", Kind.INDEX)
    p = part(
        OpRecord("aten.index_select", "m", (table, ids), (ROW,), (7, 8), (1,)), op("aten.relu", [1], [2]), outputs=(2,)
    )
    assert moved(fuse(p)) == 5 * 64 * 2 + 5 * 8 + 5 * 64 * 2


# -- properties ---------------------------------------------------------------------------------------------------
@st.composite
def programs(draw: st.DrawFn) -> Part:
    """A random program of pointwise ops and products over earlier values."""
    ops: list[OpRecord] = []
    for index in range(draw(st.integers(1, 14))):
        name = draw(st.sampled_from(["aten.relu", "aten.add", "aten.mul", "aten.softmax", "aten.linear", "aten.mm"]))
        known = st.integers(0, index)
        inputs = [draw(known)] if name in ("aten.relu", "aten.softmax") else [draw(known), draw(known)]
        if name == "aten.linear":
            inputs[1] = 1000 + index
        scope = draw(st.sampled_from([Scope.TOKEN, Scope.TOKEN, Scope.SEQUENCE]))
        ops.append(op(name, inputs, [index + 1], scope=scope))
    used = {i for o in ops for i in o.input_ids}
    free = [i for i in range(1, len(ops) + 1) if i not in used]
    also = draw(st.lists(st.integers(1, len(ops)), max_size=2))
    return part(*ops, outputs=tuple(dict.fromkeys([*free, *also])))


def members_of(original: Part, fused: Part) -> list[set[int]]:
    """Which original ops (by index) each fused op stands for, found from the values alone."""
    writer = {ident: i for i, o in enumerate(original.ops) for ident in o.output_ids}
    groups: list[set[int]] = []
    taken: set[int] = set()
    for o in fused.ops:
        if o.name != FUSED:
            groups.append({writer[o.output_ids[0]]})
            taken |= groups[-1]
            continue
        found: set[int] = set()
        todo = [writer[i] for i in o.output_ids]
        while todo:
            index = todo.pop()
            if index not in found:
                found.add(index)
                todo += [writer[i] for i in original.ops[index].input_ids if i in writer and i not in o.input_ids]
        groups.append(found)
    return groups


@settings(max_examples=300, deadline=None)
@given(programs())
def test_fusion_is_a_schedulable_partition_that_moves_no_more(original: Part) -> None:
    fused = fuse(original)
    written = {0}
    for o in fused.ops:  # in an order in which everything is written before it is read
        assert all(i in written or i >= 1000 for i in o.input_ids)
        written.update(o.output_ids)
    assert set(original.output_ids) <= written
    assert moved(fused) <= moved(original)
    groups = members_of(original, fused)
    assert sum(len(o.attr("ops", (o.name,))) for o in fused.ops) == len(original.ops)
    flat = [i for group in groups for i in group]
    assert len(flat) == len(set(flat))
    home = {i: g for g, group in enumerate(groups) for i in group}
    writer = {ident: i for i, o in enumerate(original.ops) for ident in o.output_ids}
    graph: nx.DiGraph[int] = nx.DiGraph()
    for i, o in enumerate(original.ops):
        for ident in o.input_ids:
            # an op whose result nobody reads from outside a region has no home
            if ident in writer and {writer[ident], i} <= home.keys() and home[writer[ident]] != home[i]:
                graph.add_edge(home[writer[ident]], home[i])
    assert nx.is_directed_acyclic_graph(graph)


# -- packing ------------------------------------------------------------------------------------------------------
def linear(module: str, ident: int, out: int, *, rows: int = 32, x: int = 0) -> OpRecord:
    w = TensorSpec((rows, 64), "bfloat16", Kind.WEIGHT, f"{module}.weight")
    y = TensorSpec((B, rows), "bfloat16")
    return OpRecord("aten.linear", module, (ROW, w), (y,), (x, ident), (out,))


def test_q_k_and_v_become_one_product() -> None:
    p = part(linear("a.q_proj", 10, 1), linear("a.k_proj", 11, 2, rows=8), linear("a.v_proj", 12, 3, rows=8))
    packed = pack(p)
    assert names(packed) == [PACKED_LINEAR]
    assert packed.ops[0].module == "a.q_proj+k_proj+v_proj"
    assert packed.ops[0].input_ids == (0, 10, 11, 12)
    assert packed.ops[0].output_ids == (1, 2, 3)
    table = DimTable({"B": 5})
    one = COSTS.get(PACKED_LINEAR)(table.op(packed.ops[0]))
    assert one.flops == 2 * 5 * 64 * 48
    assert one.nbytes == moved(p) - 2 * (5 * 64 * 2)  # the input is read once instead of three times


def test_other_inputs_other_modules_and_rewritten_inputs_are_not_packed() -> None:
    other_input = part(linear("a.q_proj", 10, 1), linear("a.k_proj", 11, 2, x=5), inputs=(0, 5))
    other_module = part(linear("mlp.gate", 10, 1), linear("mlp.shared.up_proj", 11, 2))
    rewritten = part(linear("a.q_proj", 10, 1), op("aten.relu_", [0], [0]), linear("a.k_proj", 11, 2))
    for p in (other_input, other_module, rewritten):
        assert pack(p) is p
