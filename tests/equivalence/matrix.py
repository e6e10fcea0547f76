"""The cells of the equivalence matrix: the whole product of axes, what of it is legal, and what CI runs of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from heapq import heapify, heappop, heapreplace
from itertools import combinations, product

from families import FAMILIES, family, kv_variants

from tensor_cast.engine.dcp import semantics_names
from tensor_cast.model_config import ModelConfig
from tensor_cast.parallel import violations
from tensor_cast.proof.cell import Cell

TP = (1, 2, 4)
DCP = (1, 2, 4)
BLOCK_SIZES = (2, 4)
QUERIES = (1, 3)
#: Verification tokens come from any drafter: whether the model brings one is not the question here.
_NOT_ASKED = frozenset(["mtp.weights"])


@dataclass(frozen=True)
class Entry:
    """A cell of one model. ``kv_heads`` is 0 where the family has none to choose."""

    family: str
    kv_heads: int
    cell: Cell

    @property
    def config(self) -> ModelConfig:
        """The model."""
        return family(self.family, self.kv_heads)

    @property
    def id(self) -> str:
        """``llama.kv2-tp4-dcp2.vllm-i1-bs4-q3``."""
        model = f"{self.family}.kv{self.kv_heads}" if self.kv_heads else self.family
        return f"{model}-{self.cell.label}"

    def broken_rules(self) -> list[str]:
        """Ids of the product's rules that forbid the cell; empty if it is legal."""
        found = violations(
            self.config,
            self.cell.parallel,
            dcp_semantics=self.cell.semantics,
            block_size=self.cell.block_size,
            num_mtp_tokens=self.cell.query - 1,
            free_experts=True,
        )
        return [error.rule for error in found if error.rule not in _NOT_ASKED]

    def values(self) -> dict[str, str]:
        """Value of every axis, where it means something."""
        cell = self.cell
        values = {"tp": cell.tp, "bs": cell.block_size, "q": cell.query, "dcp": cell.dcp}
        if self.kv_heads:
            heads = "copied" if cell.tp > self.kv_heads else "split" if cell.tp > 1 else "whole"
            values["kv"] = heads
        if self.config.is_moe:
            values |= {"dp": cell.dp, "ep": cell.ep, "moe_dp": cell.moe_dp}
        if cell.dcp > 1:
            run = "1" if cell.interleave == 1 else "block"
            values |= {"semantics": cell.semantics, "interleave": run, "prefill": cell.prefill}
        return {axis: str(value) for axis, value in values.items()}


def _experts(ranks: int, dp: int, dcp: int) -> Iterator[tuple[int, int]]:
    """(ep, moe_dp): experts cut, spread over some or all ranks, or a copy for each DP rank.

    Experts and the split context meet only through tp and dp, so under DCP the two that engines have are enough.
    """
    for ep in (1, 2, 4, 8):
        if ranks % ep == 0 and (dcp == 1 or ep in (1, ranks)):
            yield ep, 1
    if dp > 1 and dcp == 1:
        for ep in sorted({1, ranks // dp}):
            yield ep, dp


def _layouts(moe: bool) -> Iterator[tuple[int, int, int, int, int]]:
    """(tp, dcp, dp, ep, moe_dp). Attention DP matters where experts are shared between DP ranks."""
    for tp, dcp, dp in product(TP, DCP, (1, 2) if moe else (1,)):
        if tp % dcp == 0:  # else there are no such groups, and it is not a cell
            for ep, moe_dp in _experts(tp * dp, dp, dcp) if moe else [(1, 1)]:
                yield tp, dcp, dp, ep, moe_dp


def _product(name: str) -> Iterator[Entry]:
    moe = family(name).is_moe
    for kv_heads, (tp, dcp, dp, ep, moe_dp) in product(kv_variants(name), _layouts(moe)):
        for block_size, query in product(BLOCK_SIZES[-1:] if moe and dcp > 1 else BLOCK_SIZES, QUERIES):
            sizes = {"tp": tp, "dp": dp, "ep": ep, "moe_dp": moe_dp, "block_size": block_size, "query": query}
            if dcp == 1:
                yield Entry(name, kv_heads, Cell(**sizes))
                continue
            # How the prompt gets in has nothing to do with experts.
            ways = ("handover", "chunks") if dp * ep == 1 else ("handover",)
            for semantics, interleave, way in product(semantics_names(), (1, block_size), ways):
                cell = Cell(**sizes, dcp=dcp, semantics=semantics, interleave=interleave, prefill=way)
                yield Entry(name, kv_heads, cell)


@cache
def all_entries() -> tuple[tuple[Entry, ...], Counter[str]]:
    """Legal cells of the whole matrix, and how many others each rule forbids (counted once, by the first rule)."""
    legal, forbidden = [], Counter[str]()
    for name in FAMILIES:
        for entry in _product(name):
            broken = entry.broken_rules()
            if broken:
                forbidden[broken[0]] += 1
            else:
                legal.append(entry)
    return tuple(legal), forbidden


#: Axes whose values CI runs together within every family, where that is legal.
_TOGETHER = (
    ("semantics", "interleave"),
    ("semantics", "q"),
    ("semantics", "dcp"),
    ("tp", "kv"),
    ("tp", "q"),
    ("dp", "ep"),
)


def touched(entry: Entry) -> set[tuple[str, ...]]:
    """What a cell covers: axis values within its family, some pairs of them, and any pair whatever the family."""
    values = entry.values()
    items = sorted(values.items())
    found = {(entry.family, *item) for item in items}
    found |= {(*one, *two) for one, two in combinations(items, 2)}
    found |= {(entry.family, *(f"{a}={values[a]}" for a in pair)) for pair in _TOGETHER if values.keys() >= set(pair)}
    return found


@cache
def ci_entries() -> tuple[Entry, ...]:
    """A small part of the matrix that touches everything the whole of it touches; chosen greedily, always the same."""
    entries, _ = all_entries()
    covers = [touched(entry) for entry in entries]
    missing = set[tuple[str, ...]]().union(*covers)
    # What a cell adds only shrinks: the first whose known value is still true is the best.
    queue = [(-len(cover), number) for number, cover in enumerate(covers)]
    heapify(queue)
    chosen = []
    while missing:
        number = queue[0][1]
        adds = len(covers[number] & missing)
        if -queue[0][0] != adds:
            heapreplace(queue, (-adds, number))
            continue
        heappop(queue)
        missing -= covers[number]
        chosen.append(number)
    return tuple(entries[number] for number in sorted(chosen))
