"""Writing down the ops a module runs: names, shapes, who feeds whom, in which module, under which scope."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from tensor_cast.ir.expr import Dim
from tensor_cast.ir.record import Kind, OpRecord, TensorSpec
from tensor_cast.layers.context import current_scope
from tensor_cast.layers.modules import path_of
from tensor_cast.tracer.fast_shapes import quick_result

#: Ops that make room but write nothing, or only wait.
_NOTHING = frozenset(
    ["aten.empty", "aten.empty_like", "aten.new_empty", "aten.empty_strided", "_c10d_functional.wait_tensor"]
)
#: Calls that stand for a copy where their result does not alias the input.
_COPIES = {"aten.reshape": "aten.clone", "aten.contiguous": "aten.clone", "aten.flatten": "aten.clone"}
_CONVERSIONS = frozenset(["aten.to", "aten._to_copy", "aten.type_as"])
#: Arguments of custom ops that place the rank or repeat a shape; a cost function needs none of them.
_LEFT_OUT = frozenset(["dcp_rank", "interleave", "num_keys", "dtype", "first_expert", "return_lse"])
_ATEN_KEPT = frozenset(["dim", "dims", "k", "keepdim"])


@dataclass
class Marker:
    """A point in the recording: ``what`` happened, with the values that went in and came out."""

    what: tuple[Any, ...]
    input_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()


class Recorder(TorchDispatchMode):
    """Records ops while it is the active dispatch mode.

    Args:
        dim: turns a torch size into a dimension of ours.
        group_sizes: ranks per collective axis.
        weights: storage of each parameter and buffer -> its full name.
        caches: storages of paged caches -> their kind.
        check: called after each op whose result torch worked out; raises where that fixed a size.

    ``events`` holds :class:`OpRecord` and :class:`Marker` in order.
    """

    def __init__(
        self,
        dim: Callable[[Any], Dim],
        group_sizes: Mapping[str, int],
        weights: Mapping[int, str],
        caches: Mapping[int, Kind] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._check = check
        self.events: list[OpRecord | Marker] = []
        self._dim = dim
        self._group_sizes = group_sizes
        self._weights = weights
        self._caches = dict(caches or {})
        self._ids: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []  # storages are told apart by address, so none may be freed meanwhile
        self._modules: list[str] = [""]
        self._paused = 0

    # -- values -------------------------------------------------------------------------------------------------
    def value_id(self, tensor: torch.Tensor) -> int:
        """Number of the value a tensor holds; views share their base's number."""
        key = storage_key(tensor)
        if key not in self._ids:
            self._ids[key] = len(self._ids)
            self._alive.append(tensor)
        return self._ids[key]

    def ids_in(self, tree: Any) -> tuple[int, ...]:
        """Numbers of all tensors in nested arguments, each once, weights left out."""
        found = dict.fromkeys(self.value_id(t) for t in tensors_in(tree) if storage_key(t) not in self._weights)
        return tuple(found)

    def _spec(self, tensor: torch.Tensor) -> TensorSpec:
        key = storage_key(tensor)
        name = self._weights.get(key, "")
        dtype = str(tensor.dtype).removeprefix("torch.")
        if name:
            kind = Kind.WEIGHT
        elif key in self._caches:
            kind = self._caches[key]
        else:
            kind = Kind.ACTIVATION if tensor.dtype.is_floating_point or dtype == "bool" else Kind.INDEX
        return TensorSpec(tuple(map(self._dim, tensor.shape)), dtype, kind, name)

    # -- control ------------------------------------------------------------------------------------------------
    def mark(self, *what: Any, inputs: Any = (), outputs: Any = ()) -> None:
        """Put a marker into the recording."""
        self.events.append(Marker(what, self.ids_in(inputs), self.ids_in(outputs)))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ops inside run but are not recorded."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Record, with the module path followed through forward hooks."""

        def enter(module: nn.Module, args: Any) -> None:
            self._modules.append(path_of(module) or self._modules[-1])

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._modules.pop()

        hooks = (
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        )
        try:
            with self:
                yield self
        finally:
            for hook in hooks:
                hook.remove()

    # -- dispatch -----------------------------------------------------------------------------------------------
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.dropout.default and not args[2]:
            return args[0]  # inference: hands its input on, as the same value
        result = quick_result(func, args, kwargs)
        if result is None:
            result = func(*args, **kwargs)
            self._check()
        if not self._paused:
            self._record(func, args, kwargs, result)
        return result

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        schema = func._schema
        name = f"{func.namespace}.{schema.name.partition('::')[2]}"
        outputs = tensors_in(result)
        inputs = tensors_in((args, kwargs))
        if name == "tensor_cast.gather_kv":
            self._caches |= dict.fromkeys(map(storage_key, outputs), self._caches[storage_key(inputs[0])])
        mutates = schema.is_mutable
        if name in _NOTHING or (not outputs and not mutates):
            if name == "_c10d_functional.wait_tensor":
                self._alias(inputs[0], outputs[0])
            return
        held = {storage_key(t) for t in inputs}
        if not mutates and all(storage_key(t) in held for t in outputs):
            return  # a view
        if name in _COPIES:
            name = _COPIES[name]
        elif name in _CONVERSIONS:
            name = "aten.clone" if outputs[0].dtype == inputs[0].dtype else "aten._to_copy"
        named = _arguments(schema, args, kwargs)
        axis = named.get("group_name") if func.namespace == "_c10d_functional" else None
        self.events.append(
            OpRecord(
                name=name,
                module=self._modules[-1],
                inputs=tuple(map(self._spec, inputs)),
                outputs=tuple(map(self._spec, outputs)),
                input_ids=tuple(map(self.value_id, inputs)),
                output_ids=tuple(map(self.value_id, outputs)),
                attrs=self._attrs(func.namespace, named),
                axis=axis,
                group_size=None if axis is None else self._group_sizes[axis],
                scope=current_scope(),
            )
        )

    def _alias(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._ids[storage_key(target)] = self.value_id(source)
        self._alive.append(target)

    def _attrs(self, namespace: str, named: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
        if namespace == "_c10d_functional":
            return ()
        kept = {}
        for key, value in named.items():
            if key in _LEFT_OUT if namespace == "tensor_cast" else key not in _ATEN_KEPT:
                continue
            if isinstance(value, list | tuple):
                value = tuple(value)
            if value is None or isinstance(value, bool | int | float | str | tuple):
                kept[key] = value
        return tuple(sorted(kept.items()))


def _arguments(schema: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Non-tensor arguments by name, defaults included."""
    out = {}
    for position, argument in enumerate(schema.arguments):
        if position < len(args):
            value = args[position]
        elif argument.name in kwargs:
            value = kwargs[argument.name]
        else:
            value = argument.default_value
        if not isinstance(value, torch.Tensor) and "Tensor" not in str(argument.type):
            out[argument.name] = value
    return out


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of the memory behind a tensor; views share it."""
    return tensor.untyped_storage()._cdata


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Tensors in nested lists, tuples and dicts, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, list | tuple):
        return [t for item in tree for t in tensors_in(item)]
    if isinstance(tree, dict):
        return [t for item in tree.values() for t in tensors_in(item)]
    return []
