"""A bounded memo for what is derived from parts of a trace."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

import numpy as np

from tensor_cast.ir.expr import Num

__all__ = ["Memo", "env_key"]

V = TypeVar("V")


class Memo(Generic[V]):
    """A bounded memo whose keys may hold parts by identity; the entry keeps the part alive, so an id stays its own."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._entries: OrderedDict[Hashable, tuple[object, V]] = OrderedDict()

    def get(self, key: Hashable, owner: object, make: Callable[[], V]) -> V:
        """The value under ``key``, from ``make`` the first time; ``owner`` is what the key names by identity."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
            return found[1]
        value = make()
        self._entries[key] = (owner, value)
        if len(self._entries) > self.limit:
            self._entries.popitem(last=False)
        return value

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()


def env_key(env: Mapping[str, Num]) -> Hashable:
    """What tells two environments apart; arrays by their content."""
    out: list[Hashable] = []
    for name in sorted(env):
        value = env[name]
        if isinstance(value, np.ndarray):
            out.append((name, value.shape, str(value.dtype), value.tobytes()))
        else:
            out.append((name, value))
    return tuple(out)
