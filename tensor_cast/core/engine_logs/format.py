"""What the lines of an engine's log look like, as data."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tensor_cast.errors import ConfigError

__all__ = ["NUMBER", "Line", "LogFormat", "Who", "as_bool", "as_count", "as_number", "as_partition", "as_text", "flag"]

#: Where a line must have a number: whatever stands there, so that a garbled one is seen and not skipped.
NUMBER = r"(\S+?)"

#: GiB of what a size may be printed in; "GB" is what several engines call a GiB.
_GIB_OF = {"KiB": 2**-20, "MiB": 2**-10, "GiB": 1, "GB": 1, "TiB": 2**10}
_IN_BYTES = re.compile(rf"(?<![\w.,])([-+]?[\d.,]*\d) ?({'|'.join(_GIB_OF)})\b")
_ANY_UNIT = re.compile(r"(?<=[\d.]) ?([A-Za-z]{0,2}[bB])\b")

_PLAIN = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?")


def as_number(text: str) -> float:
    """``1,234.5`` as a number. Raises :class:`ConfigError` for anything that is none, or is not finite."""
    plain = text.strip().rstrip(".,;")
    value = float(plain.replace(",", "")) if _PLAIN.fullmatch(plain) and any(map(str.isdigit, plain)) else math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{text!r} is no number")
    return value


def as_count(text: str) -> int:
    """A whole number. Raises :class:`ConfigError`."""
    value = as_number(text)
    if value != int(value):
        raise ConfigError(f"{text!r} is no whole number")
    return int(value)


def as_partition(text: str) -> tuple[int, ...]:
    """``39, 39`` as layers of each stage. Raises :class:`ConfigError`."""
    return tuple(as_count(part) for part in text.split(","))


def as_text(text: str) -> str:
    """The words themselves."""
    return text


def as_bool(text: str) -> bool:
    """``True`` as it is printed."""
    return text == "True"


@dataclass(frozen=True)
class Who:
    """The process that printed a line, as far as the line tells.

    Args:
        axes: its rank on each axis that the engine names (``dp``, ``pp``, ``tp`` ...).
        named: the engine leaves out axes of size 1, so that a missing axis has one rank; else nothing is known of it.
        rank: its number over all ranks, where only that is printed.
        nth: tells lines apart that nobody signed: how often the same was printed before.
    """

    axes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    named: bool = False
    rank: int | None = None
    nth: int = 0

    def key(self) -> tuple[object, ...]:
        """The same for every line of the same process."""
        return (*sorted(self.axes.items()), self.named, self.rank, self.nth)


@dataclass(frozen=True)
class Line:
    """A line that says something: its pattern, and what its groups mean.

    Args:
        pattern: searched for in a line.
        names: of its groups; an empty one is of no interest. Groups that share a name are added.
        read: turns a group into a value.
    """

    pattern: re.Pattern[str]
    names: tuple[str, ...]
    read: Callable[[str], Any] = as_number

    def values(self, line: str) -> dict[str, Any]:
        """What ``line`` says; empty if it is another line. Raises :class:`ConfigError` for what cannot be read."""
        match = self.pattern.search(line)
        if match is None:
            return {}
        values: dict[str, Any] = {}
        for name, text in zip(self.names, match.groups(), strict=True):
            if name and text is not None:
                value = self.read(text)
                values[name] = values[name] + value if name in values else value
        return values


def flag(names: str, field_name: str, read: Callable[[str], Any] = as_count, value: str = r"[-\d.,]*\d") -> Line:
    """An option as configurations and command lines show it: ``tp_size=4``, ``'tp_size': 4``, ``--tp-size 4``."""
    return Line(re.compile(rf"(?<![A-Za-z_])(?:{names})['\"]?(?:[=:] ?|\s+)['\"]?({value})"), (field_name,), read)


@dataclass(frozen=True)
class LogFormat:
    """An engine's lines.

    Args:
        engine: its name.
        marks: only this engine prints a line with one of these.
        hints: every line that says something has one of these; long logs are mostly of lines that have none.
        start_marks: lines that begin a start; a process prints each of them once.
        rank_lines: quantities of one rank, in GiB.
        run_lines: facts of the whole run.
        who: the process that printed a line.
        sums: quantities of which a rank prints several lines that add up (target and draft model).
        firsts: quantities of which the first of several lines counts; of all others the last does.
        ends_with: the line after which nothing of interest follows, to name when a log ends too early.
        unit: what it calls a GiB.
        fix_layout: corrects sizes that the engine counts in another way, by name.
    """

    engine: str
    marks: tuple[str, ...]
    hints: tuple[str, ...]
    start_marks: tuple[re.Pattern[str], ...]
    rank_lines: tuple[Line, ...]
    run_lines: tuple[Line, ...]
    who: Callable[[str], Who]
    ends_with: str
    sums: frozenset[str] = frozenset()
    firsts: frozenset[str] = frozenset()
    unit: str = "GiB"
    fix_layout: Callable[[Mapping[str, Any]], Mapping[str, Any]] = MappingProxyType

    def printed(self, text: str) -> bool:
        """Whether this engine printed ``text``."""
        return any(mark in text for mark in self.marks)

    def may_say(self, line: str) -> bool:
        """Whether it is worth looking at ``line``."""
        return any(hint in line for hint in self.hints)

    def rank_values(self, line: str) -> Iterator[dict[str, float]]:
        """What a line says about its rank, pattern by pattern; sizes may be in KiB, MiB, GiB or TiB.

        Raises:
            ConfigError: a number is garbled, or has another unit.
        """
        line = _IN_BYTES.sub(self._in_own_unit, line)
        usual = _ANY_UNIT.sub(f" {self.unit}", line)
        for pattern in self.rank_lines:
            if values := pattern.values(line):
                yield values
            elif usual != line and pattern.pattern.search(usual):
                # It would say something, were it not for the unit.
                units = [unit for unit in _ANY_UNIT.findall(line) if unit != self.unit]
                raise ConfigError(f"unit {', '.join(map(repr, units))} is unknown; allowed are {', '.join(_GIB_OF)}")

    def _in_own_unit(self, match: re.Match[str]) -> str:
        return f"{as_number(match[1]) * _GIB_OF[match[2]]:.6f} {self.unit}" if match[2] != self.unit else match[0]

    def run_values(self, line: str) -> dict[str, Any]:
        """What a line says about the run."""
        values: dict[str, Any] = {}
        for pattern in self.run_lines:
            for name, value in pattern.values(line).items():
                values.setdefault(name, value)
        return values
