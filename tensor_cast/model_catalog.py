"""Models by name: the embedded configs, their other names, and local folders. No hub is ever reached."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from tensor_cast.config_files import config_root, read_yaml
from tensor_cast.errors import ConfigError, MsModelingError, UnknownNameError
from tensor_cast.hf_config import read_facts, text_config
from tensor_cast.hf_families import UnknownFamilyError, known_families
from tensor_cast.model_config import AttentionKind, ModelConfig

__all__ = ["describe", "load_model_config", "model_names"]


class UnknownModelError(UnknownNameError):
    """No embedded config has this id, and there is no such folder."""

    def __init__(self, name: str) -> None:
        super().__init__("model", name, model_names())
        self.args = (
            f"{self} No hub is reached: give the id of an embedded model, or a local folder that holds config.json.",
        )


def model_names() -> list[str]:
    """Hub ids of the embedded models, in alphabetical order. Reads no config."""
    return sorted(_folders(), key=str.casefold)


def load_model_config(model: str) -> ModelConfig:
    """The model called ``model``.

    Args:
        model: hub id of an embedded config (or the part after the slash, where that is unique), a local folder that
            holds ``config.json``, or the path of such a file. A folder wins over an id.

    Raises:
        UnknownNameError: neither an embedded id nor a path; the message names near misses.
        ConfigError: the config cannot be read, or lacks something every model has.
        UnsupportedModelError: the model has parts that cannot be described yet.
    """
    path = Path(model).expanduser()
    if path.exists() or model.startswith((".", "/", "~")) or path.suffix == ".json":
        return _load(_config_file(path), model)
    name = _find(model)
    return _embedded(name)


@cache
def _folders() -> dict[str, Path]:
    root = config_root() / "models"
    return {path.parent.name.replace("--", "/", 1): path.parent for path in sorted(root.glob("*--*/config.json"))}


@cache
def _names() -> dict[str, str]:
    """Every name a model goes by, folded -> hub id of its config. A short name that two models share is left out."""
    ids = {name: name for name in _folders()}
    aliases: dict[str, str] = read_yaml(config_root() / "models" / "aliases.yaml")
    out: dict[str, str] = {}
    for name, target in {**ids, **aliases}.items():
        if target not in ids:
            raise ConfigError(f"aliases.yaml: {name} points to {target}, which is not embedded")
        out[name.casefold()] = target
    short: dict[str, set[str]] = {}
    for name, target in list(out.items()):
        short.setdefault(name.split("/")[-1], set()).add(target)
    for name, targets in short.items():
        if len(targets) == 1:
            out.setdefault(name, next(iter(targets)))
    return out


def _find(model: str) -> str:
    name = _names().get(model.strip().casefold())
    if name is None:
        raise UnknownModelError(model)
    return name


@cache
def _embedded(name: str) -> ModelConfig:
    return _load(_folders()[name] / "config.json", name)


def _config_file(path: Path) -> Path:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"no config at {file}: give a folder that holds config.json, the file itself, or the id of an embedded "
            "model (no hub is reached)"
        )
    return file


def _load(file: Path, model: str) -> ModelConfig:
    raw = _read_json(file)
    config = text_config(raw, str(file))
    sidecar = file.with_name("hf_quant_config.json")
    if "quantization_config" not in config and sidecar.is_file():
        # ModelOpt checkpoints of old keep their scheme in a file of its own.
        config["quantization_config"] = {"quant_method": "modelopt", **_read_json(sidecar).get("quantization", {})}
    vision = raw.get("vision_config")
    described = describe(config, model, str(file))
    return replace(described, vision=vision) if isinstance(vision, Mapping) else described


def describe(config: Mapping[str, Any], model_id: str, where: str) -> ModelConfig:
    """The model that a text model's configuration describes.

    Args:
        config: as :func:`~tensor_cast.hf_config.text_config` returns it.
        model_id: what to call it.
        where: name of the file, for messages.

    Raises:
        ConfigError, UnsupportedModelError: see :func:`~tensor_cast.hf_config.read_facts`; what cannot be read of an
            architecture that Transformers does not know is an :class:`~tensor_cast.hf_families.UnknownFamilyError`.
    """
    try:
        facts = read_facts(config, where)
    except MsModelingError as error:
        # A wrong name explains whatever else does not fit.
        family = config.get("model_type")
        if isinstance(family, str) and family and family not in (known_families() or (family,)):
            raise UnknownFamilyError(where, family, f" ({str(error).removeprefix(f'{where}: ')})") from error
        raise
    facts["attention"] = AttentionKind(facts["attention"])
    text = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return ModelConfig(
        model_id=model_id,
        hf_config=text,
        digest=hashlib.sha256(text.encode()).hexdigest(),
        **facts,
    )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not a text file in UTF-8") from error
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{file} is not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold a JSON object; it holds {type(content).__name__}")
    return content
