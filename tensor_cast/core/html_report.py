"""Reports as one HTML file that needs no network: stacked bars of memory and timelines, as inline SVG.

Everything is computed before anything is written, and the file replaces an older one at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from tensor_cast.core.files import write_atomically

__all__ = ["Bar", "Block", "Section", "memory_svg", "render_page", "timeline_svg", "write_report"]

#: Colours that stay apart for colour-blind readers (Okabe and Ito), in the order in which they are given out.
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999933", "#882255")
_GREY = "#9a9a9a"
#: Parts of memory have one colour each in every report; parts of other names take what is left.
_PARTS = {
    "weights": PALETTE[0],
    "KV cache": PALETTE[1],
    "activation": PALETTE[2],
    "graphs": PALETTE[3],
    "graphs and other": PALETTE[3],
    "non-torch": PALETTE[4],
    "KV idle": PALETTE[5],
}

_WIDTH, _LEFT, _RIGHT = 960, 150, 130

_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin-bottom:.2rem}h2{font-size:1.15rem;margin-top:2rem}
svg{width:100%;height:auto;font:12px system-ui,sans-serif}
svg text{fill:currentColor}svg .in{fill:#fff}svg .axis{stroke:currentColor;stroke-opacity:.35}
table{border-collapse:collapse;margin:.8rem 0}td,th{padding:.2rem .8rem;border-bottom:1px solid #8884;text-align:right}
td:first-child,th:first-child{text-align:left}.note{opacity:.75}
"""


@dataclass(frozen=True)
class Bar:
    """One stacked bar: memory of a stage.

    Args:
        label: what stands before it.
        parts: (name, GiB) from the left; equal names have one colour in all bars of all reports.
        budget: GiB that it may fill.
    """

    label: str
    parts: tuple[tuple[str, float], ...]
    budget: float

    @property
    def total(self) -> float:
        """GiB of all parts."""
        return sum(size for _, size in self.parts)


@dataclass(frozen=True)
class Block:
    """A stretch of time on one row of a timeline.

    Args:
        row: index from the top.
        start, end: seconds.
        group: decides the colour; negative for what belongs to no group (a transfer).
        label: written into the block where there is room.
        detail: shown when pointed at.
        strong: drawn with a frame.
    """

    row: int
    start: float
    end: float
    group: int
    label: str = ""
    detail: str = ""
    strong: bool = False


@dataclass(frozen=True)
class Section:
    """A heading with text, pictures and a table (first row: headings)."""

    heading: str
    text: str = ""
    pictures: tuple[str, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = field(default=())


def memory_svg(bars: Sequence[Bar]) -> str:
    """Stacked horizontal bars on one scale, each with its budget as a dashed line."""
    names = list(dict.fromkeys(name for bar in bars for name, _ in bar.parts))
    others = [name for name in names if name not in _PARTS]
    spare = [colour for colour in PALETTE if colour not in _PARTS.values()]
    colours = {name: _PARTS.get(name) or spare[others.index(name) % len(spare)] for name in names}
    most = max([1e-9, *(max(bar.total, bar.budget) for bar in bars)])
    scale = (_WIDTH - _LEFT - _RIGHT) / most
    height = 40 + 34 * len(bars)
    out = [_legend(colours)]
    for index, bar in enumerate(bars):
        top, x = 34 + 34 * index, float(_LEFT)
        out.append(f'<text x="{_LEFT - 8}" y="{top + 16}" text-anchor="end">{escape(bar.label)}</text>')
        for name, size in bar.parts:
            width = size * scale
            out.append(_rect(x, top, width, 24, colours[name], f"{name}: {size:.2f} GiB"))
            if width > 44:
                out.append(_inside(x + width / 2, top + 16, f"{size:.2f}"))
            x += width
        line = _LEFT + bar.budget * scale
        out.append(
            f'<line x1="{line:.2f}" x2="{line:.2f}" y1="{top - 4}" y2="{top + 28}" stroke="currentColor" '
            f'stroke-dasharray="4 3" stroke-width="2"><title>budget: {bar.budget:.2f} GiB</title></line>'
        )
        room = f"{bar.total:.2f} of {bar.budget:.2f} GiB"
        out.append(f'<text x="{_WIDTH - _RIGHT + 10}" y="{top + 16}">{room}</text>')
    return _svg(height, out, "memory of each stage against its budget")


def timeline_svg(rows: Sequence[str], blocks: Sequence[Block], *, end: float | None = None) -> str:
    """Blocks of time on named rows. ``end`` sets the scale (seconds); by default the last block's end."""
    last = end or max([block.end for block in blocks], default=1.0)
    scale = (_WIDTH - _LEFT - 20) / last
    bottom = 8 + 30 * len(rows)
    out = []
    for index, name in enumerate(rows):
        top = 8 + 30 * index
        out.append(f'<text x="{_LEFT - 8}" y="{top + 17}" text-anchor="end">{escape(name)}</text>')
        out.append(_line(_LEFT, top + 26, _WIDTH - 20, top + 26))
    for tick in _ticks(last):
        x = _LEFT + tick * scale
        out.append(_line(x, 8, x, bottom + 4))
        out.append(f'<text x="{x:.2f}" y="{bottom + 18}" text-anchor="middle">{tick * 1e3:g} ms</text>')
    for block in blocks:
        if block.start >= last:
            continue
        x, width = _LEFT + block.start * scale, (min(block.end, last) - block.start) * scale
        top = 8 + 30 * block.row
        colour = _GREY if block.group < 0 else PALETTE[block.group % len(PALETTE)]
        out.append(_rect(x, top + 1, width, 24, colour, block.detail or block.label, strong=block.strong))
        if block.label and width > 9 * len(block.label):
            out.append(_inside(x + width / 2, top + 17, block.label))
    return _svg(bottom + 26, out, "batches on stages over time")


def _ticks(last: float) -> list[float]:
    """Round numbers from 0 to ``last``, about eight of them."""
    step = 10.0**-12
    while last / step > 8:
        for factor in (1, 2, 5, 10):
            if last / (step * factor) <= 8:
                break
        step *= factor
    return [step * i for i in range(int(last / step) + 1)]


def _legend(colours: dict[str, str]) -> str:
    x, out = _LEFT, []
    for name, colour in colours.items():
        out.append(f'<rect x="{x}" y="6" width="12" height="12" fill="{colour}"/>')
        out.append(f'<text x="{x + 17}" y="16">{escape(name)}</text>')
        x += 34 + 7 * len(name)
    return "".join(out)


def _rect(x: float, y: float, width: float, height: float, colour: str, title: str, *, strong: bool = False) -> str:
    frame = ' stroke="currentColor" stroke-width="2"' if strong else ' stroke="#fff" stroke-width=".5"'
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0):.2f}" height="{height}" fill="{colour}"{frame}>'
        f"<title>{escape(title)}</title></rect>"
    )


def _inside(x: float, y: float, text: str) -> str:
    return f'<text class="in" x="{x:.2f}" y="{y}" text-anchor="middle" pointer-events="none">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="axis" x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}"/>'


def _svg(height: float, parts: Iterable[str], label: str) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-label="{label}">'
    return f"{head}{''.join(parts)}</svg>"


def render_page(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """The whole document."""
    out = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>',
        f'<h1>{escape(title)}</h1><p class="note">{escape(subtitle)}</p>',
    ]
    for section in sections:
        out.append(f"<h2>{escape(section.heading)}</h2>")
        if section.text:
            out.append(f"<p>{escape(section.text)}</p>")
        out += section.pictures
        if section.table:
            head, *rows = section.table
            out.append("<table><tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>")
            out += ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
            out.append("</table>")
        out += [f'<p class="note">{escape(note)}</p>' for note in section.notes]
    return "\n".join([*out, "</body></html>"]) + "\n"


def write_report(path: Path, title: str, subtitle: str, sections: Sequence[Section]) -> None:
    """Write the document to ``path``, all of it or nothing. Raises :class:`ConfigError` where that is impossible."""
    write_atomically(path, render_page(title, subtitle, sections))
