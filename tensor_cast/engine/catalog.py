"""Engines by name, and which one a device is served with by default."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from pydantic import ValidationError

from tensor_cast.config_files import explain, is_path, read_yaml, yaml_names
from tensor_cast.device.profile import DeviceProfile
from tensor_cast.engine.profile import EngineProfile
from tensor_cast.errors import UnknownNameError

__all__ = ["default_engine", "engine_names", "load_engine"]


def engine_names() -> list[str]:
    """Names of the embedded engines, in alphabetical order. Reads no file."""
    return sorted(stem.replace("_", "-") for stem in yaml_names("engines"))


def load_engine(name: str) -> EngineProfile:
    """The engine called ``name`` (case, ``-`` and ``_`` do not matter), or the one in the YAML file at that path.

    Raises:
        UnknownNameError: no such engine; the message names near misses.
        ConfigError: the file cannot be read or does not fit :class:`EngineProfile`.
    """
    if is_path(name):
        return _load(Path(name).expanduser())
    path = yaml_names("engines").get(name.strip().lower().replace("-", "_"))
    if path is None:
        raise UnknownNameError("engine", name, engine_names())
    return _embedded(path)


def default_engine(device: DeviceProfile | None) -> str:
    """Name of the engine that serves on ``device``: vllm-ascend on Huawei's, vllm on others, vllm-ascend without one.

    The last because the decode context parallelism that is modelled follows vllm-ascend.
    """
    return "vllm-ascend" if device is None or device.vendor.casefold() == "huawei" else "vllm"


@cache
def _embedded(path: Path) -> EngineProfile:
    return _load(path)


def _load(path: Path) -> EngineProfile:
    try:
        return EngineProfile.model_validate(read_yaml(path))
    except ValidationError as error:
        raise explain(path, error) from error
