"""The parallel sizes of a run: from its configuration line, from the names of its ranks, or from the user."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from tensor_cast.core.engine_logs.format import LogFormat, Who
from tensor_cast.core.engine_logs.starts import Start
from tensor_cast.errors import ConfigError

__all__ = ["GivenLayout", "RunLayout", "run_layout"]


@dataclass(frozen=True)
class GivenLayout:
    """What the user says of the measured run, for logs that do not; None where nothing is said."""

    tp_size: int | None = None
    dp_size: int | None = None
    pp_layer_partition: tuple[int, ...] | None = None


@dataclass(frozen=True)
class RunLayout:
    """Sizes of the measured run.

    Args:
        dp_size: data parallel ranks of attention; tp_size and pp_size likewise.
        assigned: (dp, pp, tp) of a rank's number, as far as the log says.
    """

    tp_size: int
    pp_size: int
    dp_size: int
    assigned: dict[int, tuple[int, int, int]]

    def stage(self, who: Who) -> int | None:
        """Pipeline stage of a process; None where it cannot be told."""
        if self.pp_size == 1:
            return 0
        if who.named:
            return who.axes.get("pp", 0)
        if who.rank is None:
            return None
        # Rank order is dp, pp, tp, tp fastest.
        known = self.assigned.get(who.rank)
        return known[1] if known else who.rank // self.tp_size % self.pp_size


#: Axis -> how to say what is missing.
_HOW = {
    "tp": "how many tensor parallel ranks it had: give --measured-tp-size",
    "pp": "how many pipeline stages it had: give --measured-pp-layer-partition",
    "dp": "how many data parallel ranks it had: give --measured-dp-size",
}
#: No run has more ranks on an axis; a larger number is garbled.
_MOST_RANKS = 16_384
_AXES = ("dp", "pp", "tp")


def run_layout(form: LogFormat, start: Start, given: GivenLayout) -> RunLayout:
    """The sizes of the run that ``start`` is of.

    Raises:
        ConfigError: they can be told neither from the log nor from what is given, or contradict each other.
    """
    sizes: dict[str, Any] = {
        name: start.run[name] for name in ("tp_size", "pp_size", "dp_size", "dp_attention") if name in start.run
    }
    for axis, size in _from_names(start).items():
        stated = sizes.setdefault(f"{axis}_size", size)
        if size is not None and stated is not None and size > stated:
            raise ConfigError(f"the run has {axis}_size {stated}, yet lines of {axis.upper()} rank {size - 1}")
    sizes = {**sizes, **form.fix_layout(sizes)}
    for name, value in asdict(given).items():
        if value is None:
            continue
        name, value = ("pp_size", len(value)) if name == "pp_layer_partition" else (name, value)
        if sizes.get(name) not in (None, value):
            raise ConfigError(f"the log says {name} {sizes[name]}, --measured-{name.replace('_', '-')} {value}")
        sizes[name] = value
    _complete(sizes, start)
    for axis in _AXES:
        if (size := sizes.get(f"{axis}_size")) is not None and not 1 <= size <= _MOST_RANKS:
            raise ConfigError(f"the log says {axis}_size {size:,}; allowed are 1 to {_MOST_RANKS:,}")
    missing = [axis for axis in _AXES if sizes.get(f"{axis}_size") is None]
    if missing:
        raise ConfigError(_missing(start, missing))
    return RunLayout(sizes["tp_size"], sizes["pp_size"], sizes["dp_size"], start.assigned)


def _from_names(start: Start) -> dict[str, int | None]:
    """Size of each axis as the names of the ranks tell: one more than the highest; None where they do not tell."""
    if start.assigned:
        return {axis: 1 + max(ranks[i] for ranks in start.assigned.values()) for i, axis in enumerate(_AXES)}
    if not any(record.who.named for record in start.ranks.values()):
        return {}
    sizes: dict[str, int | None] = {}
    for axis in _AXES:
        ranks = {who.axes[axis] for who in start.names.values() if axis in who.axes}
        # An axis is named because it has several ranks: the first alone does not say how many.
        sizes[axis] = 1 if not ranks else None if ranks == {0} else 1 + max(ranks)
    return sizes


def _complete(sizes: dict[str, Any], start: Start) -> None:
    """Fill in what the number of ranks says."""
    numbers = [who.rank for who in start.names.values() if who.rank is not None]
    if sizes.get("dp_size") is None and not any("dp" in who.axes for who in start.names.values()):
        sizes["dp_size"] = 1
    world = start.world_size or (1 + max(numbers) if numbers else None)
    unknown = [axis for axis in _AXES if sizes.get(f"{axis}_size") is None]
    if world is not None and len(unknown) == 1:
        known = prod(sizes.get(f"{axis}_size") or 1 for axis in _AXES)
        if world % known == 0:
            sizes[f"{unknown[0]}_size"] = world // known
    elif unknown == ["pp"] and not any("pp" in who.axes for who in start.names.values()):
        # Options show what was not left at its default.
        sizes["pp_size"] = 1


def _missing(start: Start, axes: list[str]) -> str:
    unsigned = sum(not record.who.named and record.who.rank is None for record in start.ranks.values())
    why = f"; {unsigned} account(s) of memory carry no name of a rank" if unsigned else ""
    return (
        f"the layout of the measured run cannot be told: it has no line with the engine's configuration (such as "
        f"tensor_parallel_size=4, pipeline_parallel_size=2), and the names of its ranks do not say{why}. Missing is "
        + " and ".join(_HOW[axis] for axis in axes)
    )
