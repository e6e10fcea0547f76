"""The trace as a value: what one step of a model does on one rank, with sizes as expressions.

A :class:`Trace` is a sequence of :class:`Segment`; a segment runs one :class:`Part` once for each of its layers. Parts
are shared between layouts (attention depends on tp and dcp, the feed-forward block on tp and ep), so a search traces
and prices each part once. Nothing here knows torch, devices or time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from tensor_cast.dtypes import bits_of
from tensor_cast.ir.expr import Dim, Expr, Num, evaluate, substitute

#: The layer's index in a module path: its first number (``model.layers.3.mlp``).
_LAYER_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")

#: The symbols every trace may use; see :mod:`tensor_cast.ir.expr`.
SYMBOLS = ("B", "Q", "S")


class Phase(StrEnum):
    """What the step does: generate tokens from a filled cache, or take in a prompt."""

    DECODE = "decode"
    PREFILL = "prefill"


class Kind(StrEnum):
    """What a tensor is; quantisation and memory accounting ask."""

    ACTIVATION = "activation"
    WEIGHT = "weight"
    KV = "kv"  # the paged cache and what is read from it
    INDEXER = "indexer"  # the paged cache of an indexer's keys, which has a format of its own, and what is read from it
    INDEX = "index"  # token ids, positions, block_table, slot_mapping, expert ids


class Scope(StrEnum):
    """What the sizes of an op depend on; a step that mixes prefill and decode sums over scopes.

    ``TOKEN`` ops see only the number of tokens B*Q, so tokens of both phases run through them together.
    ``SEQUENCE`` ops belong to one phase and depend on S (attention and what surrounds it).
    ``SAMPLE`` ops see the tokens whose logits are wanted.
    """

    TOKEN = "token"
    SEQUENCE = "sequence"
    SAMPLE = "sample"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, dtype and role of one tensor; ``name`` is the full parameter name of a weight, else empty."""

    shape: tuple[Dim, ...]
    dtype: str
    kind: Kind = Kind.ACTIVATION
    name: str = ""

    @property
    def numel(self) -> Dim:
        """Number of elements, an int or an :class:`Expr`."""
        total: Dim = 1
        for dim in self.shape:
            total = Expr.wrap(total) * dim if isinstance(dim, Expr) or isinstance(total, Expr) else total * dim
        return total.simplified() if isinstance(total, Expr) else total

    def nbytes(self, env: Mapping[str, Num] | None = None, *, smooth: bool = False) -> Num:
        """Bytes under ``env``; needs none when the shape is constant."""
        return evaluate(self.numel, env or {}, smooth=smooth) * (bits_of(self.dtype) / 8)

    def at(self, env: Mapping[str, Num], *, smooth: bool = False) -> TensorSpec:
        """The same tensor with every dimension evaluated under ``env``."""
        return replace(self, shape=tuple(evaluate(d, env, smooth=smooth) for d in self.shape))

    def to_json(self) -> dict[str, Any]:
        """``{"shape": [int | str], "dtype": str}``, the public form of ``msmodeling trace --format json``."""
        return {"shape": [str(d) if isinstance(d, Expr) else int(d) for d in self.shape], "dtype": self.dtype}


@dataclass(frozen=True, slots=True)
class OpRecord:
    """One call of one op.

    Args:
        name: ``aten.linear``, ``tensor_cast.attention``, ``_c10d_functional.all_reduce`` ... (overload left out).
        module: path of the module that ran it, e.g. ``model.layers.3.self_attn.q_a_proj``.
        inputs, outputs: tensors in call order.
        input_ids, output_ids: which value each tensor is, unique within the part; weights have their own ids.
        attrs: the non-tensor arguments that a cost function needs, as sorted (name, value) pairs.
        repeat: calls within one run of the part (1 unless the part itself loops).
        axis, group_size: of a collective: name of the parallel axis and ranks in the group; else None.
        scope: see :class:`Scope`.
    """

    name: str
    module: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    input_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    attrs: tuple[tuple[str, Any], ...] = ()
    repeat: int = 1
    axis: str | None = None
    group_size: int | None = None
    scope: Scope = Scope.TOKEN

    def attr(self, name: str, default: Any = None) -> Any:
        """The attribute ``name``, or ``default``."""
        for key, value in self.attrs:
            if key == name:
                return value
        return default

    @property
    def is_collective(self) -> bool:
        """Whether the op crosses ranks."""
        return self.axis is not None

    def collective_bytes(self, env: Mapping[str, Num], *, smooth: bool = False) -> Num | None:
        """Bytes of the local input buffer of one call of a collective; None for a local op."""
        if not self.is_collective:
            return None
        return sum(t.nbytes(env, smooth=smooth) for t in self.inputs)

    def with_dims(self, env: Mapping[str, Dim]) -> OpRecord:
        """The same op with some symbols of its shapes replaced; the others stay."""

        def fill(tensor: TensorSpec) -> TensorSpec:
            return replace(tensor, shape=tuple(substitute(dim, env) for dim in tensor.shape))

        return replace(self, inputs=tuple(map(fill, self.inputs)), outputs=tuple(map(fill, self.outputs)))

    def at(self, env: Mapping[str, Num], *, smooth: bool = False) -> OpRecord:
        """The same op with every shape evaluated under ``env``."""
        return replace(
            self,
            inputs=tuple(t.at(env, smooth=smooth) for t in self.inputs),
            outputs=tuple(t.at(env, smooth=smooth) for t in self.outputs),
        )


class Role(StrEnum):
    """What a parameter is for; quantisation schemes choose by role."""

    LINEAR = "linear"
    EXPERTS = "experts"
    ROUTER = "router"
    EMBEDDING = "embedding"
    LM_HEAD = "lm_head"
    NORM = "norm"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter on one rank.

    Args:
        name: full parameter name of the representative layer.
        shape: local shape on the largest shard; ``full_shape``: unsharded.
        splits: (dim, axis, ways) for each split dimension; empty when replicated. With replicated KV heads ``ways`` is
            smaller than the axis.
        tied_to: name of the parameter whose storage it shares; such a parameter costs nothing.
    """

    name: str
    shape: tuple[int, ...]
    full_shape: tuple[int, ...]
    dtype: str
    role: Role
    splits: tuple[tuple[int, str, int], ...] = ()
    tied_to: str = ""

    @property
    def numel(self) -> int:
        """Elements on this rank."""
        total = 1
        for dim in self.shape:
            total *= dim
        return total

    @property
    def full_numel(self) -> int:
        """Elements of the unsharded parameter."""
        total = 1
        for dim in self.full_shape:
            total *= dim
        return total


@dataclass(frozen=True)
class Part:
    """A piece of the program: ops in order, the parameters they use, and the values that cross its border.

    ``key`` names the part within a model and everything it depends on: ``attention/3/decode/tp8/dcp4/...``.
    """

    key: str
    ops: tuple[OpRecord, ...]
    params: tuple[ParamSpec, ...] = ()
    input_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Segment:
    """One part, run once for each layer of ``layers``; outside the layer stack ``layers`` is empty and it runs once.

    ``query_len`` overrides Q for the segments of a draft module, whose later passes take one token each.
    """

    part: Part
    layers: tuple[int, ...] = ()
    query_len: int | None = None

    @property
    def repeat(self) -> int:
        """How many times the part runs in one step."""
        return len(self.layers) or 1

    def module_of(self, op: OpRecord) -> str:
        """Module path of ``op`` in the first layer that this segment runs; equal layers share one part's paths."""
        if not self.layers:
            return op.module
        return _LAYER_INDEX.sub(str(self.layers[0]), op.module, count=1)

    def ops(self) -> Iterator[OpRecord]:
        """The part's ops as this segment runs them: module paths of its first layer, calls of all its layers.

        Where the segment sets a query length of its own it stands in the shapes for ``Q``.
        """
        for op in self.part.ops:
            sized = op if self.query_len is None else op.with_dims({"Q": self.query_len})
            yield replace(sized, module=self.module_of(op), repeat=op.repeat * self.repeat)


def at_layer(module: str, layers: tuple[int, ...]) -> str:
    """Path of the same module in the first of ``layers``, unless it already lies in one of them.

    A part is shared by all layers that do the same work; its own paths name the layer that was traced.
    """
    found = _LAYER.match(module) if layers else None
    if found is None or int(found[2]) in layers:
        return module
    return f"{found[1]}{layers[0]}{found[3]}"


_LAYER = re.compile(r"(.*?\.)(\d+)(\..*|$)")


@dataclass(frozen=True)
class Trace:
    """What one rank runs in one step.

    Args:
        model_id: hub id or folder of the model.
        phase: decode or prefill.
        layout: the sizes it was traced for, by axis name (``{"tp": 8, "dcp": 4, ...}``), for display.
        segments: in program order.
        replicated: modules that the shard plan left whole on every rank, for the user to see.
    """

    model_id: str
    phase: Phase
    layout: Mapping[str, int]
    segments: tuple[Segment, ...]
    replicated: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @cached_property
    def ops(self) -> tuple[OpRecord, ...]:
        """Every op in order; ``repeat`` counts the layers that run it."""
        return tuple(op for segment in self.segments for op in segment.ops())

    @property
    def params(self) -> Iterator[tuple[ParamSpec, int]]:
        """Each parameter with the number of layers that have one like it.

        A part may fill several segments: layers of other kinds add up, a layer that runs again (a draft module's later
        passes) counts once.
        """
        layers: dict[str, set[int]] = {}
        specs: dict[str, ParamSpec] = {}
        for segment in self.segments:
            for param in segment.part.params:
                specs.setdefault(param.name, param)
                layers.setdefault(param.name, set()).update(segment.layers)
        for name, spec in specs.items():
            yield spec, len(layers[name]) or 1

    def at(self, env: Mapping[str, Num]) -> tuple[OpRecord, ...]:
        """Every op with its shapes evaluated under ``env`` (exactly)."""
        return tuple(op.at(env) for op in self.ops)
