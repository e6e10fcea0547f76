"""Devices by name: the embedded ones, and a user's own file.

``fits_like: H100_SXM`` in a file takes over what it does not give itself of another device's ``kernels`` and
``collectives``; each number taken over says so in its source.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from tensor_cast.config_files import explain, is_path, read_yaml, yaml_names
from tensor_cast.device.profile import FROM_FILE, CollectiveFit, DeviceProfile, KernelFit
from tensor_cast.device.topology_file import load_topology
from tensor_cast.errors import ConfigError, UnknownNameError

__all__ = ["device_names", "load_device"]

#: Key of a device file that names the device whose fits it takes over.
_LIKE = "fits_like"

_Fit = TypeVar("_Fit", KernelFit, CollectiveFit)


def device_names() -> list[str]:
    """Names of the embedded devices, in alphabetical order. Reads no file."""
    return sorted(stem.upper() for stem in yaml_names("devices"))


def load_device(name: str) -> DeviceProfile:
    """The device called ``name`` (case does not matter), or the one in the YAML file at the path ``name``.

    ``DEVICE@TOPOLOGY`` puts it into another machine: a name or a file of :mod:`tensor_cast.device.topology_file`.

    Raises:
        UnknownNameError: no such device or topology; the message names near misses.
        ConfigError: the file cannot be read or does not fit :class:`DeviceProfile`.
    """
    chip, at, machine = name.partition("@")
    if at and not Path(name).is_file():
        return _placed(chip, machine)
    if is_path(name):
        return _load(Path(name).expanduser())
    path = yaml_names("devices").get(name.strip().lower())
    if path is None:
        raise UnknownNameError("device", name, device_names())
    return _embedded(path)


@cache
def _placed(chip: str, machine: str) -> DeviceProfile:
    return load_topology(machine).apply(load_device(chip))


@cache
def _embedded(path: Path) -> DeviceProfile:
    device = _load(path)
    if device.name.lower() != path.stem:
        raise ConfigError(f"{path}: field name: found {device.name!r}; the file name says {path.stem.upper()!r}")
    return device


def _load(path: Path) -> DeviceProfile:
    content = read_yaml(path)
    like = content.pop(_LIKE, None)
    if like is not None:
        content |= _taken_over(path, like, content)
    try:
        return DeviceProfile.model_validate(content, context=FROM_FILE)
    except ValidationError as error:
        problem = explain(path, error)
        if like is None and not {"kernels", "collectives"} <= content.keys():
            raise ConfigError(
                f"{problem}; '{_LIKE}: H100_SXM' takes over what is missing of kernels and collectives"
            ) from error
        raise problem from error


def _taken_over(path: Path, like: object, content: Mapping[str, Any]) -> dict[str, Any]:
    """Fits of the device called ``like``, marked as taken over; those that ``content`` gives itself come first."""
    source = yaml_names("devices").get(like.strip().lower()) if isinstance(like, str) else None
    if source is None or _LIKE in read_yaml(source):
        own = [name for name in device_names() if _LIKE not in read_yaml(yaml_names("devices")[name.lower()])]
        raise ConfigError(
            f"{path}: field {_LIKE}: found {like!r}; allowed is a device with its own fits: {', '.join(own)}"
        )
    other = _embedded(source)
    found: dict[str, Any] = {
        "kernels": {key: _marked(fit, other.name) for key, fit in other.kernels.items()},
        "collectives": {key: _marked(fit, other.name) for key, fit in other.collectives.items()},
    }
    for field, fits in found.items():
        given = content.get(field) or {}
        # What is no mapping is left for the schema to refuse.
        found[field] = {**fits, **given} if isinstance(given, Mapping) else given
    return found


def _marked(fit: _Fit, name: str) -> _Fit:
    """The same numbers, whose error on this device nobody knows."""
    changes: dict[str, Any] = {"source": f"taken over from {name}: {fit.source}", "error": None}
    if isinstance(fit, CollectiveFit) and fit.large is not None:
        changes["large"] = _marked(fit.large, name)
    return fit.model_copy(update=changes)
