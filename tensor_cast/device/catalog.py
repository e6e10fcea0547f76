"""Devices by name: the embedded ones, and a user's own file."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from pydantic import ValidationError

from tensor_cast.config_files import explain, is_path, read_yaml, yaml_names
from tensor_cast.device.profile import DeviceProfile
from tensor_cast.device.topology_file import load_topology
from tensor_cast.errors import ConfigError, UnknownNameError

__all__ = ["device_names", "load_device"]


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
    try:
        return DeviceProfile.model_validate(read_yaml(path))
    except ValidationError as error:
        raise explain(path, error) from error
