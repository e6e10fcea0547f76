"""Traced parts on disk, so that a warm run needs no torch.

One file per part: a checksum line and compact JSON. Files are written under a temporary name and renamed, so readers
never see half of one and two runs may write the same part at once; a file that does not check out counts as absent and
is written again.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from tensor_cast.ir.expr import Dim, Expr
from tensor_cast.ir.program import Skeleton, Slot
from tensor_cast.ir.record import Kind, OpRecord, ParamSpec, Part, Role, Scope, TensorSpec

#: Packages of this code whose source decides what a trace looks like (the engine's: DCP semantics).
_SOURCES = ("layers", "ops", "tracer", "ir", "engine")


def default_cache_dir() -> Path:
    """``$MSMODELING_CACHE_DIR``, else ``traces`` in the user's cache directory."""
    named = os.environ.get("MSMODELING_CACHE_DIR")
    if named:
        return Path(named)
    import platformdirs

    return Path(platformdirs.user_cache_dir("msmodeling", appauthor=False)) / "traces"


@lru_cache(maxsize=1)
def code_digest() -> str:
    """Digest of our tracing code and of the versions of torch and Transformers, found without importing them."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parent.parent
    for package in _SOURCES:
        for path in sorted((root / package).glob("*.py")):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    for name in ("torch", "transformers"):
        try:
            digest.update(f"{name}={metadata.version(name)};".encode())
        except metadata.PackageNotFoundError:
            digest.update(f"{name}=none;".encode())
    return digest.hexdigest()


class TraceCache:
    """Parts and skeletons of one model.

    Args:
        directory: where the files are; created when something is written.
        model_digest: identity of the model's configuration.
    """

    def __init__(self, directory: Path, model_digest: str) -> None:
        self._directory = directory
        self._base = hashlib.sha256(f"{model_digest}|{code_digest()}".encode())

    def path(self, key: str) -> Path:
        """File of a part."""
        digest = self._base.copy()
        digest.update(f"|{key}".encode())
        name = digest.hexdigest()
        return self._directory / name[:2] / f"{name[2:34]}.json"

    def load_part(self, key: str) -> Part | None:
        """The part, or None when it is absent or its file is damaged."""
        part: Part | None = self._load(key, part_from_json)
        return part

    def load_skeleton(self) -> Skeleton | None:
        """The skeleton, or None when it is absent or its file is damaged."""
        skeleton: Skeleton | None = self._load("skeleton", skeleton_from_json)
        return skeleton

    def store_part(self, part: Part) -> None:
        """Write a part; a directory that cannot be written is no error, the next run traces again."""
        self._store(part.key, part_to_json(part))

    def store_skeleton(self, skeleton: Skeleton) -> None:
        """Write the skeleton; see :meth:`store_part`."""
        self._store("skeleton", skeleton_to_json(skeleton))

    def _load(self, key: str, decode: Any) -> Any:
        try:
            raw = self.path(key).read_bytes()
        except OSError:
            return None
        checksum, _, body = raw.partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != checksum:
            return None
        try:
            value = json.loads(body)
            return decode(value["value"]) if value["key"] == key else None
        except (ValueError, KeyError, TypeError, IndexError):
            return None

    def _store(self, key: str, value: Any) -> None:
        body = json.dumps({"key": key, "value": value}, separators=(",", ":")).encode()
        target = self.path(key)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".", suffix=".tmp")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
                Path(temporary).replace(target)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
        except OSError:
            return


# -- encoding -----------------------------------------------------------------------------------------------------
def _dims_to_json(shape: Iterable[Dim]) -> list[Any]:
    return [str(d) if isinstance(d, Expr) else d for d in shape]


def _dims_from_json(shape: list[Any]) -> tuple[Dim, ...]:
    return tuple(Expr.parse(d) if isinstance(d, str) else d for d in shape)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def part_to_json(part: Part) -> dict[str, Any]:
    """JSON value of a part; equal tensors are written once."""
    specs: dict[TensorSpec, int] = {}

    def refs(tensors: tuple[TensorSpec, ...]) -> list[int]:
        return [specs.setdefault(t, len(specs)) for t in tensors]

    ops = [
        [
            op.name,
            op.module,
            refs(op.inputs),
            refs(op.outputs),
            op.input_ids,
            op.output_ids,
            op.attrs,
            op.repeat,
            op.axis,
            op.group_size,
            str(op.scope),
        ]
        for op in part.ops
    ]
    return {
        "key": part.key,
        "specs": [[_dims_to_json(t.shape), t.dtype, str(t.kind), t.name] for t in specs],
        "ops": ops,
        "params": [[p.name, p.shape, p.full_shape, p.dtype, str(p.role), p.splits, p.tied_to] for p in part.params],
        "in": part.input_ids,
        "out": part.output_ids,
    }


_KINDS = {str(k): k for k in Kind}
_SCOPES = {str(s): s for s in Scope}
_ROLES = {str(r): r for r in Role}


def part_from_json(value: dict[str, Any]) -> Part:
    """Inverse of :func:`part_to_json`."""
    specs = [TensorSpec(_dims_from_json(s), dtype, _KINDS[kind], name) for s, dtype, kind, name in value["specs"]]
    ops = tuple(
        OpRecord(
            name,
            module,
            tuple(specs[i] for i in inputs),
            tuple(specs[i] for i in outputs),
            tuple(input_ids),
            tuple(output_ids),
            tuple((k, _frozen(v)) for k, v in attrs),
            repeat,
            axis,
            group_size,
            _SCOPES[scope],
        )
        for name, module, inputs, outputs, input_ids, output_ids, attrs, repeat, axis, group_size, scope in value["ops"]
    )
    params = tuple(
        ParamSpec(name, tuple(shape), tuple(full), dtype, _ROLES[role], _frozen(splits), tied)
        for name, shape, full, dtype, role, splits, tied in value["params"]
    )
    return Part(value["key"], ops, params, tuple(value["in"]), tuple(value["out"]))


def skeleton_to_json(skeleton: Skeleton) -> dict[str, Any]:
    """JSON value of a skeleton."""
    return {
        "slots": [[s.role, s.name, s.layers] for s in skeleton.slots],
        "draft": [[s.role, s.name, s.layers] for s in skeleton.draft],
        "redraft": [[s.role, s.name, s.layers] for s in skeleton.redraft],
        "fixed": [part_to_json(p) for p in skeleton.fixed],
        "replicated": skeleton.replicated,
        "notes": skeleton.notes,
    }


def skeleton_from_json(value: dict[str, Any]) -> Skeleton:
    """Inverse of :func:`skeleton_to_json`."""
    return Skeleton(
        tuple(Slot(role, name, tuple(layers)) for role, name, layers in value["slots"]),
        tuple(Slot(role, name, tuple(layers)) for role, name, layers in value["draft"]),
        tuple(Slot(role, name, tuple(layers)) for role, name, layers in value["redraft"]),
        tuple(part_from_json(p) for p in value["fixed"]),
        tuple(value["replicated"]),
        tuple(value["notes"]),
    )
