"""Rewrites a traced part as a quantisation scheme runs it.

Weights take the stored dtype and bring their scales as further inputs; where the scheme quantises activations, a
``tensor_cast.dynamic_quant`` op is put before the product, once for every value that several products share; tensors of
the KV cache take the cache's dtype, those of an indexer's cache theirs. A product carries its dtype in the attribute
``compute_dtype``.

Tokens that are gathered for experts are quantised before they are sent, and go with their scales, weights and expert
ids in one collective, as engines do (vLLM groups the ``all_gatherv`` of a dispatch).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tensor_cast.dtypes import bits_of
from tensor_cast.ir.expr import Dim, ceildiv, evaluate
from tensor_cast.ir.record import Kind, OpRecord, ParamSpec, Part, Role, Segment, TensorSpec, Trace
from tensor_cast.quant import FP4, FP8, QuantConfig, QuantScheme

#: Products by a stored weight. Batched products by a slice of a weight (absorbed MLA) run on a dense copy.
_LINEARS = ("aten.linear", "aten.addmm", "aten.mm")
_CAST = "aten._to_copy"
_EXPERTS = "tensor_cast.grouped_experts"
_SCORES = "tensor_cast.indexer_scores"
_GATHER = "_c10d_functional.all_gather_into_tensor"
DYNAMIC_QUANT = "tensor_cast.dynamic_quant"


def quantize(part: Part, quant: QuantConfig) -> Part:
    """``part`` as it runs under ``quant``; the same object where nothing changes."""
    return _Rewriter(part, quant).run()


def quantize_trace(trace: Trace, quant: QuantConfig) -> Trace:
    """Every part of ``trace`` rewritten; parts that segments share stay shared."""
    done: dict[int, Part] = {}
    segments: list[Segment] = []
    for segment in trace.segments:
        if id(segment.part) not in done:
            done[id(segment.part)] = quantize(segment.part, quant)
        segments.append(replace(segment, part=done[id(segment.part)]))
    return replace(trace, segments=tuple(segments))


@dataclass
class _Rewriter:
    part: Part
    quant: QuantConfig
    ops: list[OpRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        used = [i for op in self.part.ops for i in (*op.input_ids, *op.output_ids)]
        self._next_id = max([*used, *self.part.input_ids, *self.part.output_ids], default=0) + 1
        self._params: dict[str, ParamSpec] = {param.name: param for param in self.part.params}
        # widened value -> the value in the model's dtype that it was cast from
        self._narrow: dict[int, int] = {}
        # (value id, elements, width, dtype quantised to, group) -> (quantised id and spec, scale id and spec)
        self._quantised: dict[tuple[object, ...], tuple[tuple[int, TensorSpec], tuple[int, TensorSpec]]] = {}

        # gathered tokens that were quantised before -> their gathered scales
        self._received: dict[int, tuple[int, TensorSpec]] = {}

    def run(self) -> Part:
        for op in self.part.ops:
            # A value that is written again is another value; what was quantised of it is stale.
            stale = [key for key in self._quantised if key[0] in op.output_ids]
            for key in stale:
                del self._quantised[key]
            if op.name == _CAST and op.inputs[0].dtype == self.quant.model_dtype:
                self._narrow[op.output_ids[0]] = op.input_ids[0]
            self.ops.append(self._rewrite(self._with_kv_dtype(op)))
        self._drop_unread_casts()
        if len(self.ops) == len(self.part.ops) and all(a is b for a, b in zip(self.ops, self.part.ops, strict=True)):
            return self.part
        return replace(self.part, ops=tuple(self.ops))

    def _with_kv_dtype(self, op: OpRecord) -> OpRecord:
        dtypes = {Kind.KV: self.quant.kv_dtype, Kind.INDEXER: self.quant.indexer_dtype}

        def cast(specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
            return tuple(replace(s, dtype=dtypes[s.kind]) if s.kind in dtypes else s for s in specs)

        if all(s.dtype == dtypes.get(s.kind, s.dtype) for s in (*op.inputs, *op.outputs)):
            return op
        return replace(op, inputs=cast(op.inputs), outputs=cast(op.outputs))

    def _rewrite(self, op: OpRecord) -> OpRecord:
        if op.name == _SCORES:
            return self._indexer_scores(op)
        if op.name not in _LINEARS and op.name != _EXPERTS:
            return op
        if op.name == _EXPERTS:
            op = self._dispatched(op)
        weights = [i for i, spec in enumerate(op.inputs) if spec.kind is Kind.WEIGHT and spec.name in self._params]
        schemes = {i: self._scheme(op.inputs[i]) for i in weights}
        chosen = next((scheme for scheme in schemes.values() if scheme.quantises), None)
        if chosen is None:
            return self._router(op, weights)
        inputs, ids = list(op.inputs), list(op.input_ids)
        for i, scheme in schemes.items():
            if scheme.weight_dtype is not None:
                inputs[i] = replace(op.inputs[i], dtype=scheme.weight_dtype)
                self._add_scales(op.inputs[i], scheme, inputs, ids)
        model_dtype = self.quant.model_dtype if op.input_ids[0] in self._received else op.inputs[0].dtype
        # KV: the expanded prefill of MLA multiplies what it read from the cache.
        data = next(i for i, spec in enumerate(op.inputs) if spec.kind in (Kind.ACTIVATION, Kind.KV))
        if chosen.activation_dtype is not None:
            if ids[data] in self._received:
                scale_id, scale = self._received[ids[data]]
            else:
                (ids[data], inputs[data]), (scale_id, scale) = self._activation(op, data, chosen)
            inputs.append(scale)
            ids.append(scale_id)
        attrs = dict(op.attrs)
        attrs["compute_dtype"] = chosen.activation_dtype or model_dtype
        if chosen.kernel:
            attrs["kernel"] = chosen.kernel
        if op.name == _EXPERTS and (padding := self._padding(op, schemes)) > 1:
            attrs["padding"] = padding
        return replace(
            op, inputs=tuple(inputs), input_ids=tuple(ids), attrs=tuple(sorted(attrs.items(), key=lambda kv: kv[0]))
        )

    def _padding(self, op: OpRecord, schemes: Mapping[int, QuantScheme]) -> float:
        """Elements that the kernel of the experts reads for each one that there is."""
        matrices = [op.inputs[i] for i, scheme in schemes.items() if scheme.quantises]
        shapes = [tuple(int(evaluate(dim, {})) for dim in spec.shape) for spec in matrices]
        sizes = [math.prod(shape) for shape in shapes]
        padded = [
            size * self.quant.padding(spec.name, shape)
            for size, spec, shape in zip(sizes, matrices, shapes, strict=True)
        ]
        return sum(padded) / sum(sizes)

    def _dispatched(self, op: OpRecord) -> OpRecord:
        """Experts whose tokens come from other ranks: one collective, of quantised tokens and 32-bit ids.

        The gathers of tokens, weights and ids have been copied already; they are taken back and sent as one.
        """
        made = {ident: at for at, earlier in enumerate(self.ops) for ident in earlier.output_ids}
        sent = [i for i, ident in enumerate(op.input_ids) if self._is_dispatch(made.get(ident))]
        readers = [ident for other in self.part.ops for ident in other.input_ids]
        if not sent or any(readers.count(op.input_ids[i]) > 1 for i in sent):
            return op
        gathers = {i: self.ops[made[op.input_ids[i]]] for i in sent}
        # Where the last of them was, everything that is sent is known.
        last = max(made[op.input_ids[i]] for i in sent)
        taken = {made[op.input_ids[i]] for i in sent}
        tail = self.ops[last + 1 :]
        self.ops[:] = [earlier for at, earlier in enumerate(self.ops[:last]) if at not in taken]
        weights = [spec for spec in op.inputs if spec.kind is Kind.WEIGHT and spec.name in self._params]
        scheme = next((s for s in map(self._scheme, weights) if s.quantises), None)
        inputs, ids = list(op.inputs), list(op.input_ids)
        wire: list[tuple[TensorSpec, int, TensorSpec, int]] = []
        for i, gather in gathers.items():
            spec, value = gather.inputs[0], gather.input_ids[0]
            if i == 0 and scheme is not None and scheme.activation_dtype is not None:
                (value, spec), (scale_id, scale) = self._activation(gather, 0, scheme)
                gathered = replace(scale, shape=(*gather.outputs[0].shape[:-1], scale.shape[-1]))
                arrived = self._fresh()
                wire.append((scale, scale_id, gathered, arrived))
                self._received[op.input_ids[i]] = (arrived, gathered)
            elif spec.kind is Kind.INDEX:
                spec = replace(spec, dtype="int32")
            inputs[i] = replace(inputs[i], dtype=spec.dtype)
            wire.append((spec, value, inputs[i], ids[i]))
        first = gathers[sent[0]]
        self.ops.append(
            replace(
                first,
                inputs=tuple(w[0] for w in wire),
                input_ids=tuple(w[1] for w in wire),
                outputs=tuple(w[2] for w in wire),
                output_ids=tuple(w[3] for w in wire),
            )
        )
        self.ops.extend(tail)
        return replace(op, inputs=tuple(inputs))

    def _is_dispatch(self, at: int | None) -> bool:
        return at is not None and self.ops[at].name == _GATHER and self.ops[at].axis == "dp"

    def _indexer_scores(self, op: OpRecord) -> OpRecord:
        """Queries of an indexer take the type of its 8-bit keys, with a scale for each query and head."""
        dtype = self.quant.indexer_dtype
        if bits_of(dtype) != 8:
            return op
        query = op.inputs[0]
        scheme = QuantScheme("indexer", activation_dtype=dtype, group=int(evaluate(query.shape[-1], {})))
        (value, quantised), (scale_id, scale) = self._activation(op, 0, scheme)
        return replace(op, inputs=(quantised, *op.inputs[1:], scale), input_ids=(value, *op.input_ids[1:], scale_id))

    def _router(self, op: OpRecord, weights: list[int]) -> OpRecord:
        """A router that the model's code widens to float32, as engines run it.

        They keep its weight in the model's dtype, multiply in it and accumulate in float32: matrix units have no other
        way.
        """
        dtype = self.quant.model_dtype
        data = op.inputs[0]
        if not any(self._params[op.inputs[i].name].role is Role.ROUTER for i in weights) or data.dtype != "float32":
            return op
        ids = (self._narrow.get(op.input_ids[0], op.input_ids[0]), *op.input_ids[1:])
        inputs = tuple(
            replace(spec, dtype=dtype) if i == 0 or i in weights else spec for i, spec in enumerate(op.inputs)
        )
        return replace(op, inputs=inputs, input_ids=ids, attrs=(("compute_dtype", dtype), *op.attrs))

    def _drop_unread_casts(self) -> None:
        """Removes the casts whose only reader now takes the value as it was."""
        read = {ident for op in self.ops for ident in op.input_ids} | set(self.part.output_ids)
        self.ops = [
            op
            for op in self.ops
            if not (op.name == _CAST and op.output_ids[0] in self._narrow and op.output_ids[0] not in read)
        ]

    def _scheme(self, spec: TensorSpec) -> QuantScheme:
        param = self._params[spec.name]
        return self.quant.scheme_of(param.name, param.role, len(spec.shape))

    def _fresh(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _add_scales(self, weight: TensorSpec, scheme: QuantScheme, inputs: list[TensorSpec], ids: list[int]) -> None:
        shape = tuple(int(d) for d in weight.shape if isinstance(d, int))
        experts = self._params[weight.name].role is Role.EXPERTS
        for scale in scheme.scale_tensors(shape, experts=experts):
            inputs.append(TensorSpec(scale.shape, scale.dtype, Kind.WEIGHT, f"{weight.name}_{scale.suffix}"))
            ids.append(self._fresh())

    def _activation(
        self, op: OpRecord, index: int, scheme: QuantScheme
    ) -> tuple[tuple[int, TensorSpec], tuple[int, TensorSpec]]:
        """The quantised activation and its scales, from a new op or from one already there."""
        spec, value = op.inputs[index], op.input_ids[index]
        assert scheme.activation_dtype is not None
        # Products may see the value through views ([B*Q, K] and [B, Q, K]); the rows are the same.
        key = (value, spec.numel, spec.shape[-1], scheme.activation_dtype, scheme.group)
        if key not in self._quantised:
            groups: Dim = 1
            if scheme.group:
                count = ceildiv(spec.shape[-1], scheme.group)
                groups = count.simplified()
            quantised = (self._fresh(), replace(spec, dtype=scheme.activation_dtype))
            # The blocks of 16 of NVFP4 have an fp8 scale each, everything else float32 ones.
            scale_dtype = FP8 if scheme.activation_dtype == FP4 else "float32"
            scale = (self._fresh(), TensorSpec((*spec.shape[:-1], groups), scale_dtype))
            self.ops.append(
                OpRecord(
                    DYNAMIC_QUANT,
                    op.module,
                    (spec,),
                    (quantised[1], scale[1]),
                    (value,),
                    (quantised[0], scale[0]),
                    attrs=(("dtype", scheme.activation_dtype), ("group", scheme.group)),
                    repeat=op.repeat,
                    scope=op.scope,
                )
            )
            self._quantised[key] = (quantised, scale)
        (quantised_id, _), scale = self._quantised[key]
        return (quantised_id, replace(spec, dtype=scheme.activation_dtype)), scale
