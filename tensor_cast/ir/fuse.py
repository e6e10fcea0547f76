"""Merges connected pointwise regions of a part into single kernels, as a graph compiler would.

A region holds connected pointwise ops and reductions over the last dimension of one scope. It is *convex*: no path
leaves it and comes back, so that the merged op can be scheduled. The merged op, ``tensor_cast.fused``, reads what
enters the region and writes what is used outside of it; what lives only inside costs no memory traffic.

Ancestors are kept as bit sets over regions. That is the transitive closure of the value graph, kept up to date as
regions grow, and makes each legality check one AND.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from tensor_cast.dtypes import bits_of
from tensor_cast.ir.expr import Dim, Expr, evaluate
from tensor_cast.ir.opkinds import LOOK_UPS, ORDERING, POINTWISE, REDUCTION, UPDATES, vector_flops
from tensor_cast.ir.record import Kind, OpRecord, Part, Segment, TensorSpec, Trace

FUSED = "tensor_cast.fused"
#: Longest row that a fused kernel can order.
SHORT_ROW = 1024
#: Sizes at which two views of one value are compared; every view of a value scales alike.
_SAMPLE = {"B": 24, "Q": 4, "S": 4096}


def fuse(part: Part) -> Part:
    """``part`` with its fusable regions merged; ops stay in an order that respects every dependence."""
    return _Fuser(part).run()


def fuse_trace(trace: Trace) -> Trace:
    """Every part of ``trace`` fused; parts that segments share stay shared."""
    done: dict[int, Part] = {}
    segments: list[Segment] = []
    for segment in trace.segments:
        if id(segment.part) not in done:
            done[id(segment.part)] = fuse(segment.part)
        segments.append(replace(segment, part=done[id(segment.part)]))
    return replace(trace, segments=tuple(segments))


def is_fusable(op: OpRecord) -> bool:
    """Whether a compiler merges ``op`` with its neighbours."""
    if op.is_collective or op.name in UPDATES:
        return False
    if op.name in POINTWISE:
        return True
    if op.name in ORDERING:
        return _orders_short_rows(op)
    return op.name in REDUCTION and _folds_last(op)


def _orders_short_rows(op: OpRecord) -> bool:
    """Whether one thread block holds a whole row, as in the fused routing kernels of engines (top-k over experts)."""
    width = op.inputs[0].shape[-1] if op.inputs and op.inputs[0].shape else None
    return op.name in ("aten.topk", "aten.sort") and isinstance(width, int) and width <= SHORT_ROW


def _folds_last(op: OpRecord) -> bool:
    """Whether the output keeps every leading dimension of the input."""
    if not op.inputs or not op.outputs:
        return False
    rows, out = op.inputs[0].shape[:-1], op.outputs[0].shape
    return out == rows or (len(out) == len(op.inputs[0].shape) and out[:-1] == rows)


def _size(spec: TensorSpec) -> float:
    return float(evaluate(spec.numel, _SAMPLE, smooth=True)) * bits_of(spec.dtype)


@dataclass
class _Region:
    """Ops that become one; ``ancestors`` are the regions that must run before it, as a bit set."""

    index: int
    ops: list[int]
    fusable: bool
    key: tuple[object, ...]
    ancestors: int = 0

    @property
    def bit(self) -> int:
        return 1 << self.index


@dataclass
class _Value:
    """One version of a value: who wrote it (None: from outside the part) and who reads it, through which view.

    ``full`` is the largest view seen of it, ``written`` what its writer wrote (less, when updating a slice in place).
    """

    ident: int
    full: TensorSpec
    writer: int | None
    written: TensorSpec | None = None
    readers: list[tuple[int, TensorSpec]] = field(default_factory=list)
    leaves: bool = False


class _Fuser:
    def __init__(self, part: Part) -> None:
        self.part = part
        self.values: list[_Value] = []
        self.reads: list[list[int]] = []  # per op: values read, parallel to its inputs
        self.writes: list[list[int]] = []
        self.orders: list[set[int]] = []  # per op: ops that must come before
        self._link()

    def _link(self) -> None:
        """Gives every write a version of its own: an op that updates a value in place makes a new one."""
        current: dict[int, int] = {}
        for index, op in enumerate(self.part.ops):
            before: set[int] = set()
            reads: list[int] = []
            for position, (ident, spec) in enumerate(zip(op.input_ids, op.inputs, strict=True)):
                if ident not in current:
                    current[ident] = len(self.values)
                    self.values.append(_Value(ident, spec, None))
                value = self.values[current[ident]]
                if value.writer is None and _size(spec) > _size(value.full):
                    value.full = spec
                if position == 0 and op.name in LOOK_UPS:  # only the rows it returns
                    spec = replace(spec, shape=op.outputs[0].shape)
                value.readers.append((index, spec))
                reads.append(current[ident])
                if value.writer is not None:
                    before.add(value.writer)
            writes: list[int] = []
            for ident, spec in zip(op.output_ids, op.outputs, strict=True):
                full = spec
                if ident in current:  # in place: after the writer and every reader of the old version
                    old = self.values[current[ident]]
                    full = max(spec, old.full, key=_size)
                    before.update(reader for reader, _ in old.readers if reader != index)
                    if old.writer is not None:
                        before.add(old.writer)
                current[ident] = len(self.values)
                writes.append(len(self.values))
                self.values.append(_Value(ident, full, index, spec))
            self.reads.append(reads)
            self.writes.append(writes)
            self.orders.append(before)
        for ident in self.part.output_ids:
            if ident in current:
                self.values[current[ident]].leaves = True

    # -- growing regions ----------------------------------------------------------------------------------------
    def run(self) -> Part:
        regions: list[_Region] = []
        home: list[_Region] = []  # region of each op so far
        for index, op in enumerate(self.part.ops):
            region = _Region(index, [index], is_fusable(op), (op.scope, op.repeat))
            for producer in self.orders[index]:
                region.ancestors |= home[producer].bit | home[producer].ancestors
            regions.append(region)
            home.append(region)
            if not region.fusable:
                continue
            # The latest producer first: the longest chain wins where not all can join.
            for producer in sorted(self.orders[index], reverse=True):
                other = home[producer]
                if other is not region and self._may_merge(other, region, regions):
                    region = self._merge(other, region, regions)
                    for member in region.ops:
                        home[member] = region
        self._join_siblings(regions)
        return self._emit(regions)

    def _join_siblings(self, regions: list[_Region]) -> None:
        """Merges independent regions that read the same value, such as the rotation of q and of k by one table."""
        readers: dict[int, list[_Region]] = {}
        for region in regions:
            if region.fusable:
                for v in {v for i in region.ops for v in self.reads[i]}:
                    if self.values[v].full.kind is Kind.ACTIVATION:
                        readers.setdefault(v, []).append(region)
        gone: dict[int, _Region] = {}
        for group in readers.values():
            first = group[0]
            for other in group[1:]:
                while first.index in gone:
                    first = gone[first.index]
                while other.index in gone:
                    other = gone[other.index]
                independent = not (first.ancestors & other.bit or other.ancestors & first.bit)
                if first is not other and independent and self._may_merge(first, other, regions):
                    gone[other.index] = self._merge(first, other, regions)

    @staticmethod
    def _may_merge(first: _Region, second: _Region, regions: Sequence[_Region]) -> bool:
        """Whether both are fusable together and no third region lies on a path between them."""
        if not (first.fusable and second.fusable) or first.key != second.key:
            return False
        for region in regions:
            if region is first or region is second:
                continue
            after_first = bool(region.ancestors & first.bit) and bool(second.ancestors & region.bit)
            after_second = bool(region.ancestors & second.bit) and bool(first.ancestors & region.bit)
            if after_first or after_second:
                return False
        return True

    @staticmethod
    def _merge(first: _Region, second: _Region, regions: list[_Region]) -> _Region:
        """``first`` takes in ``second``; whoever came after ``second`` now comes after the whole."""
        first.ops = sorted(first.ops + second.ops)
        first.ancestors = (first.ancestors | second.ancestors) & ~first.bit & ~second.bit
        regions.remove(second)
        for region in regions:
            if region is not first and region.ancestors & (first.bit | second.bit):
                region.ancestors = (region.ancestors & ~second.bit) | first.bit | first.ancestors
        return first

    # -- writing the result -------------------------------------------------------------------------------------
    def _emit(self, regions: Sequence[_Region]) -> Part:
        ops = tuple(self.part.ops[r.ops[0]] if len(r.ops) == 1 else self._fused(r.ops) for r in _in_order(regions))
        return self.part if len(ops) == len(self.part.ops) else replace(self.part, ops=ops)

    def _fused(self, members: Sequence[int]) -> OpRecord:
        ops = [self.part.ops[i] for i in members]
        inside = set(members)
        inputs = list(self._entering(inside, members))
        outputs = [
            (value.ident, value.written)
            for i in members
            for value in (self.values[v] for v in self.writes[i])
            if value.written is not None and (value.leaves or any(r not in inside for r, _ in value.readers))
        ]
        flops: Dim = 0
        for op in ops:
            per_element = vector_flops(op.name) or 0
            counted = op.outputs if op.name in POINTWISE else op.inputs[:1]
            for spec in counted:
                flops = Expr.wrap(flops) + Expr.wrap(spec.numel) * per_element
        return OpRecord(
            FUSED,
            _common_module([op.module for op in ops]),
            tuple(spec for _, spec in inputs),
            tuple(spec for _, spec in outputs),
            tuple(ident for ident, _ in inputs),
            tuple(ident for ident, _ in outputs),
            attrs=(
                ("flops", flops.simplified() if isinstance(flops, Expr) else flops),
                ("ops", tuple(op.name for op in ops)),
            ),
            repeat=ops[0].repeat,
            scope=ops[0].scope,
        )

    def _entering(self, inside: set[int], members: Sequence[int]) -> Iterator[tuple[int, TensorSpec]]:
        """What the region reads from outside: each value once, whole or the views of it that are read, if less."""
        seen: set[int] = set()
        for i in members:
            for v in self.reads[i]:
                value = self.values[v]
                if v in seen or value.writer in inside:
                    continue
                seen.add(v)
                reads = [spec for reader, spec in value.readers if reader in inside]
                # Two reads of equal shape may be one slice twice or two slices, which a record does not tell apart;
                # reads count up to the size of the whole.
                if sum(map(_size, reads)) >= _size(value.full):
                    yield value.ident, replace(value.full, kind=reads[0].kind)
                else:
                    for spec in reads:
                        yield value.ident, spec


def _in_order(regions: Sequence[_Region]) -> list[_Region]:
    """A topological order of the regions that keeps to the program order where it can."""
    left = sorted(regions, key=lambda r: r.ops[-1])
    placed = 0
    alive = 0
    for region in left:
        alive |= region.bit
    out: list[_Region] = []
    while left:
        region = next(r for r in left if not (r.ancestors & alive & ~placed))
        left.remove(region)
        placed |= region.bit
        out.append(region)
    return out


def _common_module(paths: Sequence[str]) -> str:
    """The deepest module that holds all of ``paths``."""
    split = [path.split(".") for path in dict.fromkeys(paths)]
    common: list[str] = []
    for level in zip(*split, strict=False):
        if len(set(level)) > 1:
            break
        common.append(level[0])
    return ".".join(common)


__all__ = ["FUSED", "fuse", "fuse_trace", "is_fusable"]
