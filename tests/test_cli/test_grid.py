"""Tables keep their numbers whole on any terminal, and say which columns they left out for it."""

import re
from io import StringIO

import pytest
from rich.console import Console

from cli.inference.grid import Grid


def shown(grid: Grid, width: int) -> tuple[list[str], tuple[str, ...]]:
    console = Console(width=width, file=StringIO())
    table, dropped = grid.fitted(console)
    with console.capture() as capture:
        console.print(table)
    return capture.get().splitlines(), dropped


def numbers() -> Grid:
    grid = Grid(
        "Title",
        ("name", "bytes of a block", "blocks", "note"),
        words=("name", "note"),
        wraps="note",
        droppable=("blocks",),
    )
    grid.add_row("0 (binds)", "1,864,704", "11,411", "this one; best safe")
    return grid


# Borders and padding: 3 for each column and one more. Cells: 9, 9 (heading 16), 6, 19; a word of the note up to 4.
@pytest.mark.parametrize(
    ("width", "heading", "dropped"),
    [
        (63, "bytes of a block", ()),  # 13 + 9 + 16 + 6 + 19
        (62, "bytes of", ()),
        (41, "bytes of", ()),  # 13 + 9 + 9 + 6 + 4
        (40, "bytes of", ("blocks",)),
    ],
)
def test_what_gives_way_first(width: int, heading: str, dropped: tuple[str, ...]) -> None:
    lines, left_out = shown(numbers(), width)
    assert left_out == dropped
    assert any(re.search(rf"┃ +{heading} ┃", line) for line in lines), lines
    assert any("0 (binds)" in line and "1,864,704" in line for line in lines)
    assert max(map(len, lines)) <= width


def numbers_of(text: str) -> set[str]:
    """Cells with digits."""
    cells = {cell.strip() for line in text.splitlines() if line.startswith("│ ") for cell in line.split("│")}
    return {cell for cell in cells if any(map(str.isdigit, cell))}


def test_the_numbers_of_capacity_stay_whole(run, monkeypatch) -> None:
    class Narrow(Console):
        def __init__(self, **options: object) -> None:
            super().__init__(**{**options, "width": 100})  # type: ignore[arg-type]

    words = ("capacity", "Qwen/Qwen3-30B-A3B", "--device", "H100_SXM", "--pp-size", 2)
    wide = run(*words).out
    monkeypatch.setattr("rich.console.Console", Narrow)
    narrow = run(*words).out
    assert max(map(len, narrow.splitlines())) <= 100
    assert "Left out for want of width: " in narrow
    assert numbers_of(narrow)
    assert numbers_of(narrow) < numbers_of(wide)
