"""Tracing a model: its skeleton once, then any part for any layout.

A part is traced by calling one cut region with the fake arguments that the region received when the whole model ran;
everything outside of regions (norms, residual additions, rotary tables) does not depend on the layout and is recorded
in that one run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from tensor_cast.engine.dcp import get_semantics
from tensor_cast.errors import MsModelingError, UnsupportedModelError
from tensor_cast.layers.context import ParallelContext, Step, enter_scope, running
from tensor_cast.layers.modules import clone_tree, path_of, wrap_forward
from tensor_cast.layers.mtp import DraftModules
from tensor_cast.layers.program import Anatomy, DraftProgram, RankProgram, Region, SkippedLayer, cores
from tensor_cast.layers.sharding import Sharder
from tensor_cast.model_config import ModelConfig
from tensor_cast.ops.kv_layout import blocks_per_request
from tensor_cast.trace.program import Layout, PartRequest, Skeleton, Slot
from tensor_cast.trace.record import Kind, OpRecord, ParamSpec, Part, Phase, Role, Scope
from tensor_cast.tracer.builder import build
from tensor_cast.tracer.fold import config_signature, group, signature
from tensor_cast.tracer.recorder import Marker, Recorder, storage_key
from tensor_cast.tracer.sizes import SizeSpace

_BLOCK_SIZE = 128  # of the run that records the skeleton; nothing of attention is kept from it


class ModelTracer:
    """A model on fake tensors, from which a skeleton and parts are traced.

    Args:
        model: what to trace.
        sizes: integers for B, Q and S to trace concretely; symbolic when absent.

    Raises:
        UnsupportedModelError, ConfigError: the model cannot be traced; one sentence says why.
    """

    def __init__(self, model: ModelConfig, *, sizes: Mapping[str, int] | None = None) -> None:
        self._config = model
        self._space = SizeSpace(sizes)
        self._dtype = getattr(torch, model.dtype)
        with torch.inference_mode(), self._space.mode:
            self.anatomy = Anatomy(build(model))
        self._captured: dict[tuple[str, str], tuple[Any, Any]] = {}
        self._find_groups()
        self._skeleton: Skeleton | None = None

    # -- which layers are alike ---------------------------------------------------------------------------------
    def _find_groups(self) -> None:
        anatomy, config = self.anatomy, self.anatomy.model.config
        count = len(anatomy.layers)
        attention, ffn, whole = [], [], []
        for index, layer in enumerate(anatomy.layers):
            listed = config_signature(config, index, count)
            regions = list(anatomy.layer_regions(index))
            signatures = [(r.role, r.path.rsplit(".", 1)[1], signature(r.module), listed) for r in regions]
            names = {r.path.rsplit(".", 1)[1] for r in regions}
            bare = clone_tree(layer, "", {name: nn.Identity() for name in names})
            attention.append(signatures[0])
            ffn.append(tuple(signatures[1:]))
            whole.append((tuple(signatures), signature(bare)))
        #: representative layer -> layers like it, for each region kind and for layers as a whole.
        self.groups = group(whole)
        self._alike = {"attention": _representatives(attention), "ffn": _representatives(ffn)}

    def _region_name(self, region: Region) -> str:
        """Name of a region in part keys; equal for regions that do the same."""
        assert region.layer is not None
        kind = "attention" if region.role == "attention" else "ffn"
        child = region.path.rsplit(".", 1)[1]
        return f"{self._alike[kind][region.layer]}.{child}"

    # -- steps --------------------------------------------------------------------------------------------------
    def _step(self, phase: Phase, block_size: int, ctx: ParallelContext) -> Step:
        size = self._space.sizes
        rows = size.B * size.Q if ctx.dcp > 1 and phase is Phase.DECODE else size.B
        blocks = blocks_per_request(size.S, block_size, ctx.dcp)
        return Step(
            phase=phase,
            positions=torch.empty(size.B, size.Q, dtype=torch.int64),
            seq_len=size.S,
            block_table=torch.empty(rows, blocks, dtype=torch.int32),
            slot_mapping=torch.empty(size.B * size.Q, dtype=torch.int32),
        )

    def _num_blocks(self, block_size: int, ctx: ParallelContext) -> Any:
        return self._space.sizes.B * blocks_per_request(self._space.sizes.S, block_size, ctx.dcp)

    def _with_caches(self, step: Step, root: nn.Module, block_size: int, ctx: ParallelContext) -> Step:
        blocks = self._num_blocks(block_size, ctx)
        caches = {c.layer_idx: torch.empty(c.cache_shape(blocks, block_size), dtype=self._dtype) for c in cores(root)}
        return replace(step, kv_caches=caches)

    def _recorder(self, root: nn.Module, step: Step, ctx: ParallelContext) -> Recorder:
        sizes = {"tp": ctx.tp, "dcp": ctx.dcp, "dp": ctx.moe_dispatch, "ep": ctx.ep}
        caches = frozenset(storage_key(t) for t in step.kv_caches.values())
        return Recorder(self._space.dim, sizes, _weights(root), caches)

    # -- the skeleton -------------------------------------------------------------------------------------------
    def skeleton(self) -> Skeleton:
        """Slots, fixed parts and captured region arguments; traced at the first call."""
        if self._skeleton is None:
            with torch.inference_mode(), self._space.mode, _PlainErrors(self._config):
                self._skeleton = self._trace_skeleton()
            self._space.check()
        return self._skeleton

    def _trace_skeleton(self) -> Skeleton:
        events, program = self._run_folded(frozenset(self.groups), last_only=False)
        body, tail = _split_at_head(events)
        last_events, _ = self._run_folded(frozenset(), last_only=True)
        _, last_tail = _split_at_head(last_events)
        slots, parts = self._slots(body)
        slots.append(Slot("tail", "tail"))
        parts["glue/tail.all"] = _part("glue/tail.all", tail, [])
        parts["glue/tail.last"] = _part("glue/tail.last", last_tail, [])
        self._file_params(parts, program)
        draft: tuple[Slot, ...] = ()
        if self._config.num_nextn_predict_layers > 0:
            draft = self._draft(slots, parts)
        whole = self._whole_modules()
        return Skeleton(tuple(slots), draft, tuple(parts.values()), whole)

    def _run_folded(self, kept: frozenset[int], *, last_only: bool) -> tuple[list[OpRecord | Marker], RankProgram]:
        """Run the unsharded model with only the ``kept`` layers, regions left out of the recording but captured."""
        anatomy, ctx = self.anatomy, ParallelContext()
        tuples = [False]
        stand_ins = {
            anatomy.layer_path(i): SkippedLayer(layer, tuples)
            for i, layer in enumerate(anatomy.layers)
            if i not in kept
        }
        program = RankProgram(anatomy, ctx, stand_ins)
        step = self._with_caches(self._step(Phase.DECODE, _BLOCK_SIZE, ctx), program.model, _BLOCK_SIZE, ctx)
        recorder = self._recorder(program.model, step, ctx)
        outputs: dict[str, Any] = {}
        for region in (anatomy.embedding, anatomy.head):
            self._capture(program.model.get_submodule(region.path), region, region.role, recorder, outputs)
        for index in sorted(kept):
            for region in anatomy.layer_regions(index):
                self._capture(
                    program.model.get_submodule(region.path), region, self._region_name(region), recorder, outputs
                )
            self._bracket(program.model.get_submodule(anatomy.layer_path(index)), index, recorder, tuples)
        with recorder.recording():
            program(self._ids(), step, last_only=last_only)
        return recorder.events, program

    def _capture(
        self, module: nn.Module, region: Region, name: str, recorder: Recorder, outputs: dict[str, Any]
    ) -> None:
        def forward(inner: Any, *args: Any, **kwargs: Any) -> Any:
            known = outputs.get(name)
            with recorder.paused():
                # A region that does the same as one before gives results of the same shape.
                output = (
                    inner(*args, **kwargs) if known is None else tree_map_only(torch.Tensor, torch.empty_like, known)
                )
            outputs[name] = output
            if region.role == "head":
                enter_scope(Scope.SAMPLE)
            self._captured.setdefault((region.role, name), (args, kwargs))
            recorder.mark("region", region.role, name, inputs=(args, kwargs), outputs=output)
            return output

        wrap_forward(module, forward)

    def _bracket(self, layer: nn.Module, index: int, recorder: Recorder, tuples: list[bool]) -> None:
        def forward(inner: Any, *args: Any, **kwargs: Any) -> Any:
            recorder.mark("begin", index, inputs=(args, kwargs))
            output = inner(*args, **kwargs)
            tuples[0] = isinstance(output, tuple)
            recorder.mark("end", index, outputs=output)
            return output

        wrap_forward(layer, forward)

    def _slots(self, events: list[OpRecord | Marker]) -> tuple[list[Slot], dict[str, Part]]:
        slots: list[Slot] = []
        parts: dict[str, Part] = {}
        layer: int | None = None
        piece: list[OpRecord] = []
        count = 0

        def flush(position: int) -> None:
            nonlocal piece, count
            name = f"outer.{len(slots)}" if layer is None else f"layer.{layer}.{count}"
            if piece:
                key = f"glue/{name}"
                parts[key] = _part(key, piece, events[position:])
                slots.append(Slot("glue", name, () if layer is None else self.groups[layer]))
                count += 1
            piece = []

        for position, event in enumerate(events):
            if isinstance(event, OpRecord):
                piece.append(event)
                continue
            flush(position)
            match event.what:
                case ("begin", int(index)):
                    layer, count = index, 0
                case ("end", _):
                    layer = None
                case ("region", role, name):
                    slots.append(Slot(role, name, () if layer is None else self.groups[layer]))
        flush(len(events))
        return slots, parts

    def _file_params(self, parts: dict[str, Part], program: RankProgram) -> None:
        """Give every parameter outside of regions to the part that uses it first."""
        inside = {r.path for index in self.groups for r in self.anatomy.layer_regions(index)}
        inside |= {self.anatomy.embedding.path, self.anatomy.head.path}
        owner: dict[str, str] = {}
        for key, part in parts.items():
            for op in part.ops:
                for spec in op.inputs:
                    if spec.kind is Kind.WEIGHT:
                        owner.setdefault(spec.name, key)
        filed: dict[str, list[ParamSpec]] = {}
        for path, module in program.model.named_modules():
            if any(path == p or path.startswith(f"{p}.") for p in inside):
                continue
            for name, tensor in _stored(module):
                full = f"{path}.{name}" if path else name
                role = Role.NORM if "norm" in type(module).__name__.lower() else Role.OTHER
                shape = tuple(tensor.shape)
                spec = ParamSpec(full, shape, shape, str(tensor.dtype).removeprefix("torch."), role)
                filed.setdefault(owner.get(full) or self._fallback(path, parts), []).append(spec)
        for key, specs in filed.items():
            parts[key] = replace(parts[key], params=tuple(specs))

    def _fallback(self, path: str, parts: dict[str, Part]) -> str:
        """Part that counts a parameter no op uses: the first of its layer, else the first outside of layers."""
        prefix = f"{self.anatomy.layers_path}."
        if path.startswith(prefix):
            index = path[len(prefix) :].partition(".")[0]
            return next(key for key in parts if key.startswith(f"glue/layer.{index}."))
        return next(key for key in parts if key.startswith("glue/outer."))

    def _whole_modules(self) -> tuple[str, ...]:
        """Modules with weight matrices that no layout splits."""
        sharder = Sharder(self.anatomy.plan, ParallelContext(), self.anatomy.names)
        for index in self.groups:
            for region in self.anatomy.layer_regions(index):
                sharder.region(region.module, region.path)
        return tuple(sharder.whole)

    def _draft(self, slots: list[Slot], parts: dict[str, Part]) -> tuple[Slot, ...]:
        """Slots of the draft module: its own projection and norm around a layer like the last one."""
        count, ctx = len(self.anatomy.layers), ParallelContext()
        own = DraftModules.like(self.anatomy, self._dtype).named(self.anatomy)
        x, y = self._hidden(), self._hidden()
        parts["draft/project"] = self._run_part("draft/project", own.projection, (x, y), {}, ctx, None)
        parts["draft/norm"] = self._run_part("draft/norm", own.norm, (x,), {}, ctx, None)
        last = next(members for members in self.groups.values() if count - 1 in members)
        before = slots[: next(i for i, slot in enumerate(slots) if slot.layers)]
        embed = next(i for i, slot in enumerate(before) if slot.role == "embed") + 1
        return (
            *before[:embed],
            Slot("draft", "project"),
            *before[embed:],
            *(replace(s, layers=(count,)) for s in slots if s.layers == last),
            Slot("draft", "norm"),
            *(s for s in slots if s.role in ("head", "tail")),
        )

    def _hidden(self) -> torch.Tensor:
        size = self._space.sizes
        return torch.empty(size.B, size.Q, self._config.hidden_size, dtype=self._dtype)

    # -- parts --------------------------------------------------------------------------------------------------
    def part(self, request: PartRequest) -> Part:
        """Trace one part. Raises :class:`LegalityError` where the layout does not fit the model."""
        skeleton = self.skeleton()
        for fixed in skeleton.fixed:
            if fixed.key == request.key:
                return fixed
        ctx = ParallelContext(
            tp=request.tp,
            dcp=request.dcp,
            dp=request.dp,
            ep=request.ep,
            moe_dp=request.moe_dp,
            dcp_semantics=request.dcp_semantics or "vllm-ascend",
            interleave=request.interleave,
        )
        if request.dcp > 1:
            for violation in get_semantics(request.dcp_semantics).violations(self._config, request.tp, request.dcp):
                raise violation
        region = self._region(request)
        sharder = Sharder(self.anatomy.plan, ctx, self.anatomy.names)
        with torch.inference_mode(), self._space.mode, _PlainErrors(self._config):
            args, kwargs = self._captured[request.role, request.name]
            if request.role == "head" and request.phase == "last":
                hidden = args[0]
                args = (torch.empty(hidden.shape[0], 1, hidden.shape[2], dtype=hidden.dtype),)
            module = sharder.region(region.module, region.path)
            step = None
            if request.role == "attention":
                step = self._step(Phase(request.phase), request.block_size, ctx)
                step = self._with_caches(step, module, request.block_size, ctx)
            scope = Scope.SAMPLE if request.role == "head" else Scope.TOKEN
            part = self._run_part(request.key, module, args, kwargs, ctx, step, scope)
        self._space.check()
        if request.role == "attention" and not any("attention" in op.name for op in part.ops):
            raise UnsupportedModelError(
                f"{self._config.model_id}: {type(region.module).__name__} does not attend through Transformers' "
                "attention interface."
            )
        return replace(part, params=tuple(sharder.params.values()))

    def _region(self, request: PartRequest) -> Region:
        if request.role in ("embed", "head"):
            return self.anatomy.embedding if request.role == "embed" else self.anatomy.head
        for index in self.groups:
            for region in self.anatomy.layer_regions(index):
                if region.role == request.role and self._region_name(region) == request.name:
                    return region
        raise KeyError(request.key)

    def _run_part(
        self,
        key: str,
        module: nn.Module,
        args: Any,
        kwargs: Any,
        ctx: ParallelContext,
        step: Step | None,
        scope: Scope = Scope.TOKEN,
    ) -> Part:
        step = step or self._step(Phase.DECODE, _BLOCK_SIZE, ctx)
        recorder = self._recorder(module, step, ctx)
        input_ids = recorder.ids_in((args, kwargs))
        with running(step), recorder.recording():
            enter_scope(scope)
            output = module(*args, **kwargs)
        ops = tuple(event for event in recorder.events if isinstance(event, OpRecord))
        used = {i for op in ops for i in op.input_ids}
        outside = _outside_ids(ops)
        specs = tuple(
            ParamSpec(
                f"{path_of(child)}.{name}",
                tuple(t.shape),
                tuple(t.shape),
                str(t.dtype).removeprefix("torch."),
                Role.NORM if "norm" in type(child).__name__.lower() else Role.LINEAR,
            )
            for child in module.modules()
            for name, t in _stored(child)
        )
        return Part(
            key=key,
            ops=ops,
            params=specs,
            input_ids=tuple(dict.fromkeys([i for i in input_ids if i in used] + outside)),
            output_ids=recorder.ids_in(output),
        )

    # -- the whole program at once, to check composition ---------------------------------------------------------
    def whole(self, layout: Layout, *, fold: bool = True) -> tuple[OpRecord, ...]:
        """Every op of the cut model run in one go; each layer kind once, or every layer when not ``fold``.

        ``repeat`` of the ops inside layers counts the layers of the kind.
        """
        groups = self.groups if fold else {i: (i,) for i in range(len(self.anatomy.layers))}
        with torch.inference_mode(), self._space.mode:
            tuples = [False]
            stand_ins: dict[str, nn.Module] = {
                self.anatomy.layer_path(i): SkippedLayer(layer, tuples)
                for i, layer in enumerate(self.anatomy.layers)
                if i not in groups
            }
            program = RankProgram(self.anatomy, _context(layout), stand_ins)
            step, recorder = self._whole_step(program, layout)
            for index in groups:
                layer = program.model.get_submodule(self.anatomy.layer_path(index))
                self._bracket(layer, index, recorder, tuples)
            with recorder.recording():
                program(self._ids(), step, last_only=layout.phase is Phase.PREFILL)
        repeat, ops = 1, []
        for event in recorder.events:
            if isinstance(event, OpRecord):
                ops.append(replace(event, repeat=repeat))
            else:
                repeat = len(groups[event.what[1]]) if event.what[0] == "begin" else 1
        return tuple(ops)

    def whole_draft(self, layout: Layout) -> tuple[OpRecord, ...]:
        """Every op of one pass of the cut draft module over the step's tokens, run in one go."""
        with torch.inference_mode(), self._space.mode:
            modules = DraftModules.like(self.anatomy, self._dtype)
            program = DraftProgram(self.anatomy, _context(layout), modules)
            step, recorder = self._whole_step(program, layout)
            with recorder.recording():
                program.draft(self._ids(), self._hidden(), step)
        return tuple(event for event in recorder.events if isinstance(event, OpRecord))

    def _whole_step(self, program: RankProgram, layout: Layout) -> tuple[Step, Recorder]:
        step = self._step(layout.phase, layout.block_size, program.ctx)
        step = self._with_caches(step, program.model, layout.block_size, program.ctx)
        return step, self._recorder(program.model, step, program.ctx)

    def _ids(self) -> torch.Tensor:
        return torch.empty(self._space.sizes.B, self._space.sizes.Q, dtype=torch.int64)


def _context(layout: Layout) -> ParallelContext:
    """The first rank of a layout."""
    parallel = layout.parallel
    return ParallelContext(
        tp=parallel.tensor_parallel_size,
        dcp=layout.dcp,
        dp=parallel.data_parallel_size,
        ep=parallel.expert_parallel_size,
        moe_dp=parallel.moe_data_parallel_size,
        dcp_semantics=layout.dcp_semantics,
        interleave=parallel.cp_kv_cache_interleave_size,
    )


class _PlainErrors:
    """Turns what torch or Transformers raise while tracing into one sentence."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, MsModelingError) or not isinstance(error, Exception):
            return
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UnsupportedModelError(
            f"{self._config.model_id} ({self._config.model_type}) cannot be traced: {type(error).__name__}: {reason}"
        ) from error


def _representatives(signatures: Iterable[Any]) -> list[int]:
    """For each index the first index with the same signature."""
    first: dict[Any, int] = {}
    return [first.setdefault(sig, index) for index, sig in enumerate(signatures)]


def _stored(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers that a module holds itself."""
    buffers = ((n, b) for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set)
    return [(name, t) for name, t in (*module._parameters.items(), *buffers) if t is not None]


def _weights(root: nn.Module) -> dict[int, str]:
    names: dict[int, str] = {}
    for module in root.modules():
        path = path_of(module)
        if path is None:
            continue
        for name, tensor in _stored(module):
            names.setdefault(storage_key(tensor), f"{path}.{name}" if path else name)
    return names


def _outside_ids(ops: Iterable[OpRecord]) -> list[int]:
    """Values that the ops read but did not make, weights and caches left out."""
    made: set[int] = set()
    found: dict[int, None] = {}
    for op in ops:
        for spec, value in zip(op.inputs, op.input_ids, strict=True):
            if value not in made and spec.kind in (Kind.ACTIVATION, Kind.INDEX):
                found[value] = None
        made.update(op.output_ids)
    return list(found)


def _part(key: str, piece: list[OpRecord], later: Iterable[OpRecord | Marker]) -> Part:
    """A part of glue ops; its outputs are the values that something later reads."""
    read = {i for event in later for i in event.input_ids}
    made = dict.fromkeys(i for op in piece for i in op.output_ids)
    return Part(
        key=key,
        ops=tuple(piece),
        input_ids=tuple(_outside_ids(piece)),
        output_ids=tuple(i for i in made if i in read),
    )


def _split_at_head(events: list[OpRecord | Marker]) -> tuple[list[OpRecord | Marker], list[OpRecord]]:
    """Events up to and with the head, and the ops after it."""
    at = next(i for i, e in enumerate(events) if isinstance(e, Marker) and e.what[:2] == ("region", "head"))
    return events[: at + 1], [e for e in events[at + 1 :] if isinstance(e, OpRecord)]
