"""Packs linears that read the same value into one product, as engines do.

These are q, k and v; gate and up; the two down-projections of MLA.
An engine stores such weights as one matrix, so that one kernel reads the activations once. Linears of one module that
share input, dtype and quantisation are packed; a router, which stands beside experts, is not one of them.
"""

from __future__ import annotations

from dataclasses import replace

from tensor_cast.ir.record import Kind, OpRecord, Part

PACKED_LINEAR = "tensor_cast.packed_linear"


def pack(part: Part) -> Part:
    """``part`` with its packable linears merged; the same object where there are none."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, op in enumerate(part.ops):
        if op.name == "aten.linear" and _stored(op):
            groups.setdefault(_signature(op), []).append(index)
    merged = {members[0]: members for members in groups.values() if len(members) > 1 and _input_intact(part, members)}
    if not merged:
        return part
    absorbed = {index for members in merged.values() for index in members[1:]}
    ops = tuple(
        _packed([part.ops[i] for i in merged[index]]) if index in merged else op
        for index, op in enumerate(part.ops)
        if index not in absorbed
    )
    return replace(part, ops=ops)


def _stored(op: OpRecord) -> bool:
    return len(op.inputs) > 1 and op.inputs[1].kind is Kind.WEIGHT and len(op.outputs) == 1


def _signature(op: OpRecord) -> tuple[object, ...]:
    parent = op.module.rpartition(".")[0]
    x = op.inputs[0]
    dtypes = (x.dtype, op.inputs[1].dtype, op.outputs[0].dtype)
    return parent, op.input_ids[0], x.shape, dtypes, op.attrs, op.scope, op.repeat


def _input_intact(part: Part, members: list[int]) -> bool:
    """Whether nothing writes the shared input between the first product and the last."""
    value = part.ops[members[0]].input_ids[0]
    return all(value not in part.ops[i].output_ids for i in range(members[0], members[-1]))


def _packed(ops: list[OpRecord]) -> OpRecord:
    seen = {ops[0].input_ids[0]}
    inputs, ids = [ops[0].inputs[0]], [ops[0].input_ids[0]]
    for op in ops:
        for spec, ident in zip(op.inputs[1:], op.input_ids[1:], strict=True):
            if ident not in seen:  # the scales of the activations come with each of them
                seen.add(ident)
                inputs.append(spec)
                ids.append(ident)
    names = "+".join(op.module.rpartition(".")[2] for op in ops)
    return replace(
        ops[0],
        name=PACKED_LINEAR,
        module=f"{ops[0].module.rpartition('.')[0]}.{names}".lstrip("."),
        inputs=tuple(inputs),
        input_ids=tuple(ids),
        outputs=tuple(op.outputs[0] for op in ops),
        output_ids=tuple(op.output_ids[0] for op in ops),
    )
