"""Prints which cell catches each mutation and how: ``python tests/mutation/table.py [NAME ...]``."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parent.parent / "equivalence"))

from families import family
from mutations import MUTATIONS, Mutation, broken

from tensor_cast.model_config import ModelConfig
from tensor_cast.proof import close_shared_pool, run_cell, shared_pool
from tensor_cast.proof.cell import Cell
from tensor_cast.proof.compare import CellResult


@dataclass(frozen=True)
class Caught:
    """What a run with a mistake in it showed."""

    name: str
    mutation: Mutation
    result: CellResult

    @property
    def numbers(self) -> bool:
        """Whether logits differ."""
        return not self.result.equal

    @property
    def ops(self) -> bool:
        """Whether the executed ops are not those of the trace."""
        return self.result.trace_difference is not None

    @property
    def row(self) -> tuple[str, str, str, str]:
        """Mistake, cell, by how much logits differ and where first."""
        cell = f"{self.mutation.family} {self.mutation.cell.label}"
        how = self.result.first_mismatch or "-"
        if self.ops:
            how += "; the ops differ from the trace"
        return self.mutation.what, cell, f"{self.result.max_abs_difference:.1e}", how


def model(mutation: Mutation) -> ModelConfig:
    return family(mutation.family, mutation.kv_heads)


@cache
def sound(config: ModelConfig, cell: Cell) -> CellResult:
    """The same cell without a mistake."""
    return run_cell(config, cell, record=False)


def run(name: str, *, record: bool = True) -> Caught:
    """Run the cell of one mutation with its mistake; ``record`` also compares the executed ops with the trace."""
    mutation = MUTATIONS[name]
    result = run_cell(model(mutation), mutation.cell, inside=partial(broken, name), record=record)
    return Caught(name, mutation, result)


def main(names: list[str]) -> int:
    """Print the table of all mutations, or of those named; 1 if one goes unnoticed."""
    shared_pool(4)
    missed = 0
    for caught in map(run, names or MUTATIONS):
        missed += not caught.numbers
        print(" | ".join((caught.name, *caught.row)), flush=True)
    close_shared_pool()
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
