"""A table that keeps its numbers whole: where there is no room for all columns it leaves some out, and says which."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["Grid"]

#: Characters; wider than any table.
_UNLIMITED = 10_000


@dataclass
class Grid:
    """Rows of text under headings.

    Args:
        title: a line above.
        columns: headings; the cells below are numbers, on the right, but for those of ``words``.
        words: headings of text, on the left.
        wraps: the heading whose text may wrap.
        droppable: headings that may be left out, the first one first.
    """

    title: str
    columns: tuple[str, ...]
    words: tuple[str, ...] = ()
    wraps: str = ""
    droppable: tuple[str, ...] = ()
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add_row(self, *cells: str) -> None:
        """One cell for each column."""
        self.rows.append(cells)

    def fitted(self, console: Console) -> tuple[Table, tuple[str, ...]]:
        """The widest form that the console has room for, and the headings that it leaves out."""
        unlimited = console.options.update(width=_UNLIMITED)
        whole = self._table(())
        if console.measure(whole, options=unlimited).maximum <= console.width:
            return whole, ()
        for count in range(len(self.droppable) + 1):
            dropped = self.droppable[:count]
            table = self._table(dropped, narrow=True)
            if console.measure(table, options=unlimited).minimum <= console.width:
                break
        return table, dropped

    def _table(self, dropped: tuple[str, ...], *, narrow: bool = False) -> Table:
        from rich.table import Table

        table = Table(title=self.title, title_justify="left")
        kept = [index for index, name in enumerate(self.columns) if name not in dropped]
        for index in kept:
            heading = self.columns[index]
            cells = max((len(row[index]) for row in self.rows), default=0)
            wraps = heading == self.wraps
            table.add_column(
                # A heading is broken between its words only.
                textwrap.fill(heading, max(1, cells), break_long_words=False) if narrow else heading,
                justify="left" if heading in self.words else "right",
                no_wrap=not wraps,
                min_width=self._longest_word(index) if wraps else cells,
                overflow="fold",
            )
        for row in self.rows:
            table.add_row(*(row[index] for index in kept))
        return table

    def _longest_word(self, index: int) -> int:
        words = " ".join([self.columns[index], *(row[index] for row in self.rows)]).split()
        return max(map(len, words))
