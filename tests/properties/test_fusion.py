"""A fused kernel moves what crosses its border, no less; and never more than the ops it replaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from embedded import MODELS, Traces, cases, examples, parts_of, sizes
from hypothesis import given
from hypothesis import strategies as st

from tensor_cast.ir import fuse as fusion
from tensor_cast.ir.fuse import FUSED, fuse
from tensor_cast.ir.opkinds import LOOK_UPS
from tensor_cast.ir.pack import pack
from tensor_cast.ir.program import Layout
from tensor_cast.ir.quantize import quantize
from tensor_cast.ir.record import OpRecord, Part, TensorSpec
from tensor_cast.model_catalog import load_model_config
from tensor_cast.performance_model.base import COSTS, tensor_bytes
from tensor_cast.quant import QuantConfig

ACTIONS = ("DISABLED", "W8A8_DYNAMIC", "FP8", "W4A16")


class Spy:
    """Notes which ops each fused kernel was made of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.members: dict[int, list[int]] = {}
        inner = fusion._Fuser._fused

        def fused(fuser: Any, members: Sequence[int]) -> OpRecord:
            op: OpRecord = inner(fuser, members)
            self.members[id(op)] = list(members)
            self._kept.append(op)
            return op

        self._kept: list[OpRecord] = []
        monkeypatch.setattr(fusion._Fuser, "_fused", fused)


def nbytes(op: OpRecord, env: Mapping[str, int]) -> float:
    return float(COSTS.get(op.name)(op.at(env)).nbytes)


def border(part: Part, members: Sequence[int], env: Mapping[str, int]) -> float:
    """Least bytes that must cross the border of a region, found by walking the eager ops.

    A value from outside is read at least through its largest view, but not beyond what its writer wrote (a view may
    repeat elements); of a table only the rows that are looked up. A value that anything else reads is written.
    """

    def size(spec: TensorSpec) -> float:
        return float(tensor_bytes(spec.at(env)))

    inside, writer, written = set(members), {}, {}
    crossing: dict[tuple[str, int, int | None], float] = {}
    for index, op in enumerate(part.ops):
        for place, (ident, spec) in enumerate(zip(op.input_ids, op.inputs, strict=True)):
            by = writer.get(ident)
            if index in inside and by not in inside:
                read = size(op.outputs[0]) if place == 0 and op.name in LOOK_UPS else size(spec)
                read = min(read, written.get((ident, by), read))
                key = ("in", ident, by)
                crossing[key] = max(crossing.get(key, 0.0), read)
            if index not in inside and by in inside:
                crossing["out", ident, by] = written[ident, by]
        for ident, spec in zip(op.output_ids, op.outputs, strict=True):
            writer[ident], written[ident, index] = index, size(spec)
    for ident in part.output_ids:
        if writer.get(ident) in inside:
            crossing["out", ident, writer[ident]] = written[ident, writer[ident]]
    return sum(crossing.values())


@given(data=st.data(), case=cases(free=True), action=st.sampled_from(ACTIONS))
@examples(25)
def test_fused_bytes_lie_between_border_and_eager(
    data: st.DataObject, case: tuple[str, Layout], action: str, traces: Traces
) -> None:
    name, layout = case
    env = data.draw(sizes(layout.phase))
    quant = QuantConfig.resolve(load_model_config(name), action, None)
    with pytest.MonkeyPatch.context() as patch:
        spy = Spy(patch)
        for part in parts_of(traces.of(name, layout)).values():
            eager = pack(quantize(part, quant))
            fused = fuse(eager)
            for op in fused.ops:
                if op.name != FUSED:
                    continue
                members = spy.members[id(op)]
                moved = nbytes(op, env)
                assert moved <= sum(nbytes(eager.ops[i], env) for i in members) * (1 + 1e-12), (part.key, op.module)
                assert moved >= border(eager, members, env) * (1 - 1e-12), (part.key, op.module, op.attr("ops"))
            assert_runs(eager, fused)
            assert_same_work(eager, fused, env)


def assert_runs(eager: Part, fused: Part) -> None:
    """Each op of the fused part reads only what is there: from outside, or written by an op before it."""
    written = {ident for op in eager.ops for ident in op.output_ids}
    there: set[int] = set()
    for op in eager.ops:  # read before anything writes it: from outside
        there.update(i for i in op.input_ids if i not in written)
    seen: set[int] = set()
    for op in eager.ops:
        there.update(i for i in op.input_ids if i not in seen)
        seen.update(op.output_ids)
    there.update(fused.input_ids)
    for op in fused.ops:
        assert set(op.input_ids) <= there, (fused.key, op.name, op.module)
        there.update(op.output_ids)
    assert set(fused.output_ids) & written <= there, fused.key


def assert_same_work(eager: Part, fused: Part, env: Mapping[str, int]) -> None:
    """Fusion drops no FLOP and no op that is not pointwise."""

    def flops(part: Part) -> float:
        return float(sum(COSTS.get(op.name)(op.at(env)).flops * op.repeat for op in _sized(part, env)))

    assert flops(fused) == pytest.approx(flops(eager), rel=1e-9)
    count = sum(len(op.attr("ops")) if op.name == FUSED else 1 for op in fused.ops)
    assert count == len(eager.ops)


def _sized(part: Part, env: Mapping[str, int]) -> list[OpRecord]:
    from tensor_cast.performance_model.base import DimTable

    table = DimTable(env, smooth=False)
    return [table.op(op) for op in part.ops]


@given(data=st.data(), case=cases(MODELS))
@examples(30)
def test_packing_moves_no_more(data: st.DataObject, case: tuple[str, Layout], traces: Traces) -> None:
    """Linears joined into one product read their common input once and change nothing else."""
    name, layout = case
    env = data.draw(sizes(layout.phase))
    for part in parts_of(traces.of(name, layout)).values():
        packed = pack(part)
        before = [COSTS.get(op.name)(op.at(env)) for op in part.ops if op.name == "aten.linear"]
        after = [
            COSTS.get(op.name)(op.at(env))
            for op in packed.ops
            if op.name in ("aten.linear", "tensor_cast.packed_linear")
        ]
        assert sum(c.flops for c in after) == sum(c.flops for c in before)
        assert sum(c.bytes_written for c in after) == sum(c.bytes_written for c in before)
        assert sum(c.bytes_read for c in after) <= sum(c.bytes_read for c in before)
