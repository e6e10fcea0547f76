"""One tree of errors. Each message says what was found, what is allowed and what to do about it.

The command line turns every :class:`MsModelingError` into one message on standard error and an exit code;
a traceback therefore always means a fault of ours.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "ConfigError",
    "InfeasibleError",
    "LegalityError",
    "MsModelingError",
    "UnknownNameError",
    "UnpricedOpError",
    "UnsupportedModelError",
]


class MsModelingError(Exception):
    """Base of every error that a user can cause and mend."""

    exit_code = 2


class ConfigError(MsModelingError):
    """A configuration file or option holds a value that cannot be used."""


class UnknownNameError(ConfigError):
    """A name is not in a registry; the message lists near misses and what there is."""

    #: Names listed when nothing comes near; the rest is counted.
    listed = 40

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind = kind
        self.name = name
        self.known = sorted(known)
        near = self._near(name.casefold())
        if near:
            super().__init__(f"unknown {kind} {name!r}; did you mean {' or '.join(near)}?")
            return
        more = f" and {len(self.known) - self.listed} more" if len(self.known) > self.listed else ""
        super().__init__(f"unknown {kind} {name!r}. Known: {', '.join(self.known[: self.listed])}{more}.")

    def _near(self, name: str) -> list[str]:
        """Up to three names: those that hold ``name`` whole first, then those spelled alike."""
        by_folded = {k.casefold(): k for k in self.known}
        holding = [k for k in by_folded if name and name in k]
        alike = difflib.get_close_matches(name, by_folded, n=3, cutoff=0.6)
        return [by_folded[k] for k in dict.fromkeys((*holding, *alike))][:3]


class UnsupportedModelError(MsModelingError):
    """The model has a part that cannot be modelled yet; the message names it in one sentence."""


class LegalityError(MsModelingError):
    """A combination of sizes breaks a rule.

    Args:
        rule: stable id of the rule, e.g. ``"dcp.divides_tp"``.
        need: the condition in words.
        have: the values that break it.
        remedy: what to change.
    """

    def __init__(self, rule: str, need: str, have: str, remedy: str) -> None:
        self.rule = rule
        self.need = need
        self.have = have
        self.remedy = remedy
        super().__init__(f"[{rule}] need {need}; have {have}; {remedy}")


class UnpricedOpError(MsModelingError):
    """Under ``--strict``: the trace holds an op that no cost function prices."""


class InfeasibleError(MsModelingError):
    """Nothing meets memory and limits; the message names the nearest miss."""

    exit_code = 3
