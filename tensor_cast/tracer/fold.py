"""Finding layers that do the same work, so that each kind is traced once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import nn

_IGNORED = frozenset(["layer_idx", "layer_id", "layer_index", "training"])


#: Per-layer lists whose meaning shows in the modules: a layer that chooses tokens has an indexer, the others have none.
_SHOWN_BY_MODULES = frozenset(["indexer_types"])


def signature(module: nn.Module) -> Hashable:
    """What a module tree does, as far as structure tells: classes, parameter shapes and types, plain attributes."""
    parts: list[Hashable] = []
    for name, child in module.named_modules():
        tensors = tuple(
            (key, tuple(t.shape), str(t.dtype))
            for kind in (child._parameters, child._buffers)
            for key, t in kind.items()
            if t is not None
        )
        plain = tuple(
            (key, value)
            for key, value in child.__dict__.items()
            if key not in _IGNORED and (value is None or isinstance(value, bool | int | float | str))
        )
        parts.append((name, type(child), tensors, plain))
    return tuple(parts)


def config_signature(config: Any, layer: int, count: int) -> Hashable:
    """Entries of layer ``layer`` in every per-layer list of a configuration."""
    return tuple(
        (key, str(value[layer]))
        for key, value in sorted(vars(config).items())
        if isinstance(value, list | tuple) and len(value) == count and key not in _SHOWN_BY_MODULES
    )


def group(signatures: Sequence[Hashable]) -> dict[int, tuple[int, ...]]:
    """Indices with equal signatures, by the first of them, in order."""
    first: dict[Hashable, int] = {}
    groups: dict[int, list[int]] = {}
    for index, sig in enumerate(signatures):
        groups.setdefault(first.setdefault(sig, index), []).append(index)
    return {rep: tuple(members) for rep, members in groups.items()}
