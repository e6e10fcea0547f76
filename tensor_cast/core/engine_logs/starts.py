"""A log cut into the starts that it holds, and each start into what its ranks printed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tensor_cast.core.engine_logs.format import LogFormat, Who
from tensor_cast.errors import ConfigError

__all__ = ["RankRecord", "Start", "split_starts"]


@dataclass
class RankRecord:
    """What one rank printed, in GiB by the names of a :class:`MeasuredStage`."""

    who: Who
    values: dict[str, float] = field(default_factory=dict)


@dataclass
class Start:
    """One start.

    Args:
        first_line: number of its first line in the file.
        run: facts of the run; of several lines the first counts, of KV tokens the smallest (each engine has its own).
        ranks: what each rank printed.
        names: every process that signed a line.
        assigned: (dp, pp, tp) of a rank's number.
        world_size: ranks of the run.
        problem: the first line that could not be read.
    """

    first_line: int
    run: dict[str, Any] = field(default_factory=dict)
    ranks: dict[tuple[object, ...], RankRecord] = field(default_factory=dict)
    names: dict[tuple[object, ...], Who] = field(default_factory=dict)
    assigned: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    world_size: int | None = None
    problem: ConfigError | None = None

    def note_run(self, values: dict[str, Any]) -> None:
        """Remember facts of the run."""
        if "assigned_rank" in values:
            axes = (values["assigned_dp"], values["assigned_pp"], values["assigned_tp"])
            self.assigned[values["assigned_rank"]] = axes
            self.world_size = values["world_size"]
            return
        for name, value in values.items():
            known = self.run.setdefault(name, value)
            if name in ("kv_tokens", "num_blocks"):
                self.run[name] = min(known, value)

    def note_rank(self, form: LogFormat, who: Who, values: dict[str, float]) -> None:
        """Remember what a rank printed; lines that nobody signed are of as many ranks as there are."""
        record = self._record(form, who, values)
        for name, value in values.items():
            if name in form.sums:
                record.values[name] = record.values.get(name, 0.0) + value
            elif name in form.firsts:
                record.values.setdefault(name, value)
            else:
                record.values[name] = value

    def contradicts(self, form: LogFormat, who: Who, values: dict[str, float]) -> bool:
        """Whether the rank printed the same line before, with other numbers: it was started again."""
        record = self.ranks.get(who.key())
        signed = who.named or who.rank is not None
        return (
            record is not None
            and signed
            and any(
                name not in form.sums | form.firsts | {"graph_gib"}
                and abs(record.values.get(name, value) - value) > _ROUNDED
                for name, value in values.items()
            )
        )

    def _record(self, form: LogFormat, who: Who, values: dict[str, float]) -> RankRecord:
        signed = who.named or who.rank is not None
        while not signed:
            record = self.ranks.get(who.key())
            if record is None or not any(
                name not in form.sums and abs(record.values.get(name, value) - value) > _ROUNDED
                for name, value in values.items()
            ):
                break
            who = Who(nth=who.nth + 1)
        return self.ranks.setdefault(who.key(), RankRecord(who))


#: Two lines say the same thing (the weights as loaded, and in the account at the end) if they differ by no more, GiB.
_ROUNDED = 0.02


def split_starts(form: LogFormat, text: str) -> list[Start]:
    """The starts in ``text`` that say anything about memory, in their order.

    A start begins with a line that a process prints once and has printed before, or that follows an account of memory;
    and where a rank gives account again with other numbers.
    """
    starts = [Start(1)]
    seen: set[object] = set()
    for number, line in enumerate(text.splitlines(), 1):
        if not form.may_say(line):
            continue
        who = form.who(line)
        marks = {(i, who.axes.get("dp", 0)) for i, mark in enumerate(form.start_marks) if mark.search(line)}
        if marks & seen or (marks and starts[-1].ranks and not who.axes):
            starts.append(Start(number))
            seen = set()
        seen |= marks
        try:
            found, facts = list(form.rank_values(line)), form.run_values(line)
        except ConfigError as error:
            starts[-1].problem = starts[-1].problem or ConfigError(f"line {number}: {error}")
            continue
        if any(starts[-1].contradicts(form, who, values) for values in found):
            starts.append(Start(number))
            seen = set()
        start = starts[-1]
        if who.named or who.rank is not None:
            start.names.setdefault(who.key(), who)
        start.note_run(facts)
        for values in found:
            start.note_rank(form, who, values)
    return list(_with_memory(starts))


def _with_memory(starts: list[Start]) -> Iterator[Start]:
    """Starts that got as far as memory. One that a contradiction cut off has the layout of the one before."""
    before: Start | None = None
    for start in starts:
        if before is not None and "tp_size" not in start.run and "model" not in start.run:
            start.run = {**{k: v for k, v in before.run.items() if k not in ("kv_tokens", "num_blocks")}, **start.run}
            start.assigned = start.assigned or before.assigned
        if start.ranks or start.problem:
            yield start
        before = start
