"""A registry: named things of one kind, found without regard to case, with near misses suggested."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from tensor_cast.errors import UnknownNameError

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps names to objects. ``kind`` is the noun used in error messages."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}
        self._folded: dict[str, str] = {}

    def register(self, *names: str) -> Callable[[T], T]:
        """Decorator that files one object under each of ``names``; a name can be taken once."""

        def add(entry: T) -> T:
            for name in names:
                if name.casefold() in self._folded:
                    raise ValueError(f"{self.kind} {name!r} is registered twice")
                self._entries[name] = entry
                self._folded[name.casefold()] = name
            return entry

        return add

    def get(self, name: str) -> T:
        """The entry called ``name``. Raises :class:`UnknownNameError` with suggestions."""
        canonical = self._folded.get(name.casefold())
        if canonical is None:
            raise UnknownNameError(self.kind, name, self._entries)
        return self._entries[canonical]

    def find(self, name: str) -> T | None:
        """The entry called ``name``, or None."""
        canonical = self._folded.get(name.casefold())
        return None if canonical is None else self._entries[canonical]

    def __contains__(self, name: str) -> bool:
        return name.casefold() in self._folded

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
