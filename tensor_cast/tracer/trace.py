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
from tensor_cast.errors import UnsupportedModelError
from tensor_cast.ir.program import PartRequest, Skeleton, Slot
from tensor_cast.ir.record import Kind, OpRecord, ParamSpec, Part, Phase, Role, Scope
from tensor_cast.layers import indexer
from tensor_cast.layers.context import ParallelContext, Step, enter_scope, running
from tensor_cast.layers.modules import clone_tree, path_of, wrap_forward
from tensor_cast.layers.mtp import DraftModules
from tensor_cast.layers.program import Anatomy, RankProgram, Region, SkippedLayer
from tensor_cast.layers.sharding import Sharder
from tensor_cast.model_config import ModelConfig
from tensor_cast.tracer.boundary import plain_errors
from tensor_cast.tracer.builder import build
from tensor_cast.tracer.fold import config_signature, group, signature
from tensor_cast.tracer.glue import glue_part, glue_slots, outside_ids, split_at_head
from tensor_cast.tracer.inputs import FakeInputs, stored
from tensor_cast.tracer.recorder import Marker, Recorder
from tensor_cast.tracer.sizes import SizeSpace

#: KV block size of the run that records the skeleton; nothing of attention is kept from it.
_BLOCK_SIZE = 128

#: Ops of which an attention part has exactly one.
_ATTENTION = frozenset(f"tensor_cast.{name}" for name in ("attention", "mla_attention", "sparse_mla_attention"))

#: Names the attention of a draft pass that reuses the tokens which the pass before chose.
_REUSING = ".reusing"


class ModelTracer:
    """A model on fake tensors, from which a skeleton and parts are traced.

    Args:
        model: what to trace.
        sizes: integers for B, Q and S to trace concretely; symbolic when absent.

    ``groups`` maps the first layer of each kind to all layers of that kind.

    Raises:
        UnsupportedModelError, ConfigError: the model cannot be traced; one sentence says why.
    """

    def __init__(self, model: ModelConfig, *, sizes: Mapping[str, int] | None = None) -> None:
        self.config = model
        self.inputs = FakeInputs(SizeSpace(sizes), getattr(torch, model.dtype), model.hidden_size)
        with torch.inference_mode(), self.inputs.space.mode, plain_errors(model):
            self.anatomy = Anatomy(build(model))
            self.groups, self._alike = _find_groups(self.anatomy)
        self._captured: dict[tuple[str, str], tuple[Any, Any]] = {}
        self._skeleton: Skeleton | None = None

    def _region_name(self, region: Region) -> str:
        """Name of a region in part keys; equal for regions that do the same."""
        assert region.layer is not None
        kind = "attention" if region.role == "attention" else "ffn"
        child = region.path.rsplit(".", 1)[1]
        return f"{self._alike[kind][region.layer]}.{child}"

    # -- the skeleton -------------------------------------------------------------------------------------------
    def skeleton(self) -> Skeleton:
        """Slots, fixed parts and captured region arguments; traced at the first call."""
        if self._skeleton is None:
            with torch.inference_mode(), self.inputs.space.mode, plain_errors(self.config):
                self._skeleton = self._trace_skeleton()
        return self._skeleton

    def _trace_skeleton(self) -> Skeleton:
        events, program = self._run_folded(frozenset(self.groups), last_only=False)
        body, tail = split_at_head(events)
        # The second run only shows what follows the head when it sees one token per request: no layer is needed.
        _, last_tail = split_at_head(self._run_folded(frozenset(), last_only=True)[0])
        slots, parts = glue_slots(body, self.groups)
        slots.append(Slot("tail", "tail"))
        parts["glue/tail.all"] = glue_part("glue/tail.all", tail, [])
        parts["glue/tail.last"] = glue_part("glue/tail.last", last_tail, [])
        self._file_params(parts, program)
        draft = self._draft(slots, parts) if self.config.num_nextn_predict_layers > 0 else ()
        redraft = draft
        if self.config.index_share_for_mtp_iteration:
            redraft = tuple(replace(s, name=s.name + _REUSING) if s.role == "attention" else s for s in draft)
        return Skeleton(tuple(slots), draft, redraft, tuple(parts.values()), self._whole_modules())

    def _run_folded(self, kept: frozenset[int], *, last_only: bool) -> tuple[list[OpRecord | Marker], RankProgram]:
        """Run the unsharded model with only the ``kept`` layers, regions left out of the recording but captured."""
        anatomy, ctx, tuples = self.anatomy, ParallelContext(), [False]
        program = RankProgram(anatomy, ctx, skipping(anatomy, kept, tuples))
        step = self.inputs.step(Phase.DECODE, _BLOCK_SIZE, ctx, program.model)
        recorder = self.inputs.recorder(program.model, step, ctx)
        outputs: dict[str, Any] = {}
        for region in (anatomy.embedding, anatomy.head):
            self._capture(program.model.get_submodule(region.path), region, region.role, recorder, outputs)
        for index in sorted(kept):
            for region in anatomy.layer_regions(index):
                module, name = program.model.get_submodule(region.path), self._region_name(region)
                self._capture(module, region, name, recorder, outputs)
            bracket(program.model.get_submodule(anatomy.layer_path(index)), index, recorder, tuples)
        with recorder.recording():
            program(self.inputs.ids(), step, last_only=last_only)
        begun = [event.what[1] for event in recorder.events if isinstance(event, Marker) and event.what[0] == "begin"]
        if sorted(begun) != sorted(kept):
            raise UnsupportedModelError(
                "the layers are not run once each, one after the other; loops are not modelled."
            )
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
            self._captured.setdefault((region.role, name), (args, kwargs))
            recorder.mark("region", region.role, name, inputs=(args, kwargs), outputs=output)
            return output

        wrap_forward(module, forward)

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
            for spec in _whole_params(module, Role.OTHER, path):
                filed.setdefault(owner.get(spec.name) or self._fallback(path, parts), []).append(spec)
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
        """Slots of a draft pass: the module's own projection and norm around a layer like one of the model's last."""
        count = len(self.anatomy.layers)
        own = DraftModules.like(self.anatomy, self.inputs.dtype).named(self.anatomy)
        x, y = self.inputs.hidden(), self.inputs.hidden()
        parts["draft/project"] = self._run_part("draft/project", own.projection, (x, y))
        parts["draft/norm"] = self._run_part("draft/norm", own.norm, (x,))
        like = next(members for members in self.groups.values() if self.anatomy.draft_source in members)
        before = slots[: next(i for i, slot in enumerate(slots) if slot.layers)]
        embed = next(i for i, slot in enumerate(before) if slot.role == "embed") + 1
        return (
            *before[:embed],
            Slot("draft", "project"),
            *before[embed:],
            *(replace(s, layers=(count,)) for s in slots if s.layers == like),
            Slot("draft", "norm"),
            *(s for s in slots if s.role in ("head", "tail")),
        )

    # -- parts --------------------------------------------------------------------------------------------------
    def part(self, request: PartRequest) -> Part:
        """Trace one part.

        Raises:
            LegalityError: the layout does not fit the model.
            UnsupportedModelError: the part cannot be traced.
        """
        for fixed in self.skeleton().fixed:
            if fixed.key == request.key:
                return fixed
        if request.dcp > 1:
            for violation in get_semantics(request.dcp_semantics).violations(self.config, request.tp, request.dcp):
                raise violation
        ctx = ParallelContext(
            tp=request.tp,
            dcp=request.dcp,
            dp=request.dp,
            ep=request.ep,
            moe_dp=request.moe_dp,
            dcp_semantics=request.dcp_semantics or ParallelContext.dcp_semantics,
            interleave=request.interleave,
        )
        name = request.name.removesuffix(_REUSING)
        region = self._region(request.role, name)
        sharder = Sharder(self.anatomy.plan, ctx, self.anatomy.names)
        with torch.inference_mode(), self.inputs.space.mode, plain_errors(self.config):
            args, kwargs = self._captured[request.role, name]
            if request.role == "head" and request.phase == "last":
                args, kwargs = (self.inputs.hidden(1),), {}
            module = sharder.region(region.module, region.path)
            if name != request.name:
                choice = self.inputs.choice(self.config.index_topk)
                indexer.reuse(module.indexer, lambda: choice)
            step = None
            if request.role == "attention":
                step = self.inputs.step(Phase(request.phase), request.block_size, ctx, module)
            part = self._run_part(request.key, module, args, kwargs, ctx, step)
            if request.role == "attention":
                _attends_once(type(region.module).__name__, part)
        return replace(part, params=tuple(sharder.params.values()))

    def _region(self, role: str, name: str) -> Region:
        if role in ("embed", "head"):
            return self.anatomy.embedding if role == "embed" else self.anatomy.head
        for index in self.groups:
            for region in self.anatomy.layer_regions(index):
                if region.role == role and self._region_name(region) == name:
                    return region
        raise KeyError(f"{role}/{name}")

    def _run_part(
        self,
        key: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        ctx: ParallelContext | None = None,
        step: Step | None = None,
    ) -> Part:
        """Record one call of ``module``; parameters are taken as they are."""
        ctx, kwargs = ctx or ParallelContext(), kwargs or {}
        step = step or self.inputs.step(Phase.DECODE, _BLOCK_SIZE, ctx, module)
        recorder = self.inputs.recorder(module, step, ctx)
        input_ids = recorder.ids_in((args, kwargs))
        with running(step), recorder.recording():
            enter_scope(Scope.SAMPLE if key.startswith("head") else Scope.TOKEN)
            output = module(*args, **kwargs)
        ops = tuple(event for event in recorder.events if isinstance(event, OpRecord))
        used = {i for op in ops for i in op.input_ids}
        return Part(
            key=key,
            ops=ops,
            params=tuple(spec for m in module.modules() for spec in _whole_params(m, Role.LINEAR, path_of(m) or "")),
            input_ids=tuple(dict.fromkeys([*(i for i in input_ids if i in used), *outside_ids(ops)])),
            output_ids=recorder.ids_in(output),
        )


def _attends_once(what: str, part: Part) -> None:
    """Refuse a module that attends past our function, or more than once: each call would write the same KV cache."""
    calls = sum(op.name in _ATTENTION for op in part.ops)
    if calls == 0:
        raise UnsupportedModelError(f"{what} does not attend through Transformers' attention interface.")
    if calls > 1:
        raise UnsupportedModelError(f"{what} attends {calls} times in a step; one attention per layer is modelled.")


def skipping(anatomy: Anatomy, kept: Iterable[int], tuples: list[bool]) -> dict[str, nn.Module]:
    """Stand-ins for all layers but the ``kept`` ones; see :class:`SkippedLayer`."""
    wanted = frozenset(kept)
    return {
        anatomy.layer_path(i): SkippedLayer(layer, tuples) for i, layer in enumerate(anatomy.layers) if i not in wanted
    }


def bracket(layer: nn.Module, index: int, recorder: Recorder, tuples: list[bool]) -> None:
    """Make a decoder layer mark its begin and end in the recording, and note whether it returns a tuple."""

    def forward(inner: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.mark("begin", index, inputs=(args, kwargs))
        output = inner(*args, **kwargs)
        tuples[0] = isinstance(output, tuple)
        recorder.mark("end", index, outputs=output)
        return output

    wrap_forward(layer, forward)


def _find_groups(anatomy: Anatomy) -> tuple[dict[int, tuple[int, ...]], dict[str, list[int]]]:
    """Layers of each kind by the first of them, and for every layer the first whose attention (ffn) does the same."""
    config, count = anatomy.model.config, len(anatomy.layers)
    attention, ffn, whole = [], [], []
    for index, layer in enumerate(anatomy.layers):
        listed = config_signature(config, index, count)
        regions = list(anatomy.layer_regions(index))
        names = [region.path.rsplit(".", 1)[1] for region in regions]
        signatures = [(r.role, name, signature(r.module), listed) for r, name in zip(regions, names, strict=True)]
        bare = clone_tree(layer, "", {name: nn.Identity() for name in names})
        attention.append(signatures[0])
        ffn.append(tuple(signatures[1:]))
        whole.append((tuple(signatures), signature(bare)))
    return group(whole), {"attention": _representatives(attention), "ffn": _representatives(ffn)}


def _representatives(signatures: Iterable[Any]) -> list[int]:
    """For each index the first index with the same signature."""
    first: dict[Any, int] = {}
    return [first.setdefault(sig, index) for index, sig in enumerate(signatures)]


def _whole_params(module: nn.Module, role: Role, path: str) -> list[ParamSpec]:
    """Parameters of one module that nothing splits; those of a norm have their own role, others ``role``."""
    role = Role.NORM if "norm" in type(module).__name__.lower() else role
    return [
        ParamSpec(
            name=f"{path}.{name}" if path else name,
            shape=tuple(tensor.shape),
            full_shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            role=role,
        )
        for name, tensor in stored(module)
    ]
