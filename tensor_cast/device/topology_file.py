"""Machines: links that may stand between any devices, as files of their own.

A device profile has the links of the machine that the device usually comes in. A topology replaces them (and, where its
links ask for another algorithm, the fits of collectives) and leaves the chip alone: ``A100_80G_PCIE@nvlink_pairs``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tensor_cast.config_files import explain, is_path, read_yaml, yaml_names
from tensor_cast.device.profile import COLLECTIVES, FROM_FILE, CollectiveFit, DeviceProfile, Tier
from tensor_cast.errors import ConfigError, UnknownNameError

__all__ = ["Topology", "load_topology", "topology_names"]


class Topology(BaseModel):
    """Links between devices.

    Args:
        tiers: levels of links, see :class:`tensor_cast.device.profile.Tier`.
        collectives: fits that replace the device's, by kind.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    description: str
    tiers: Annotated[tuple[Tier, ...], Field(min_length=1)]
    collectives: Mapping[str, CollectiveFit] = Field(default_factory=dict)

    def apply(self, device: DeviceProfile) -> DeviceProfile:
        """``device`` in this machine, called ``DEVICE@topology``.

        Raises:
            ConfigError: a tier or a collective that no device can have.
        """
        if unknown := [kind for kind in self.collectives if kind not in COLLECTIVES]:
            raise ConfigError(
                f"topology {self.name}: {', '.join(unknown)} is no collective; known: {', '.join(COLLECTIVES)}"
            )
        fields = {
            **dict(device),
            "name": f"{device.name}@{self.name}",
            "tiers": self.tiers,
            "collectives": {**device.collectives, **self.collectives},
        }
        try:
            return DeviceProfile.model_validate(fields)
        except ValidationError as error:
            raise explain(f"topology {self.name}", error) from error


def topology_names() -> list[str]:
    """Names of the embedded topologies, in alphabetical order. Reads no file."""
    return sorted(yaml_names("topologies"))


def load_topology(name: str) -> Topology:
    """The embedded topology called ``name``, or the one in the YAML file at that path.

    Raises:
        UnknownNameError: there is none of that name.
        ConfigError: the file cannot be read or does not fit :class:`Topology`.
    """
    path = Path(name).expanduser() if is_path(name) else yaml_names("topologies").get(name.strip().lower())
    if path is None:
        raise UnknownNameError("topology", name, topology_names())
    return _load(path)


@cache
def _load(path: Path) -> Topology:
    try:
        return Topology.model_validate(read_yaml(path), context=FROM_FILE)
    except ValidationError as error:
        raise explain(path, error) from error
