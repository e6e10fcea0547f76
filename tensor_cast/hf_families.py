"""Which architectures the installed Transformers knows, read from its files: nothing of it is imported."""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import re
from functools import cache
from pathlib import Path

from tensor_cast.errors import UnsupportedModelError

__all__ = ["ALIASES", "UnknownFamilyError", "known_families", "transformers_version"]

#: Types that Transformers does not map but that are, weight for weight, one that it does.
ALIASES = {"kimi_k2": "deepseek_v3"}

_MAPPED = re.compile(r'"([\w.-]+)"\s*(?:,|:|\]\s*=)\s*"\w+Config"')


class UnknownFamilyError(UnsupportedModelError):
    """A ``model_type`` that the installed Transformers does not know; the message lists near names.

    Args:
        where: the model or its file.
        family: its ``model_type``.
        more: what comes on top; empty, or a clause that goes on.
    """

    def __init__(self, where: str, family: str, more: str = "") -> None:
        near = difflib.get_close_matches(family.casefold(), known_families(), n=3)
        meant = f"did you mean {' or '.join(near)}?" if near else "docs/models.md lists the families that are traced."
        super().__init__(
            f"{where}: the installed Transformers ({transformers_version()}) knows no model_type {family!r}{more}; "
            f"{meant}"
        )


@cache
def known_families() -> frozenset[str]:
    """Every ``model_type`` with a configuration class, and :data:`ALIASES`; empty without Transformers."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return frozenset()
    files = (Path(spec.origin).parent / "models" / "auto").glob("*.py")
    found = {name for file in files for name in _MAPPED.findall(file.read_text(encoding="utf-8"))}
    return frozenset(found) | frozenset(ALIASES)


def transformers_version() -> str:
    """Version of the installed Transformers; ``not installed`` where there is none."""
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
