"""What all fits to measured points share: folds by case, robust least squares, errors, a line of the table."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from tensor_cast.device.profile import CollectiveFit, KernelFit

Array = npt.NDArray[np.float64]
SOURCE = "fit of aiconfigurator-core 0.12.0 op tables"
FOLDS = 5


def fold_of(case: object) -> int:
    """Which fold a case belongs to; depends on nothing but the case."""
    return zlib.crc32(repr(case).encode()) % FOLDS


@dataclass(frozen=True)
class Fitted:
    """One line of the table."""

    device: str
    key: str
    rows: int
    dropped: int
    error: float
    bias: float
    fit: KernelFit | CollectiveFit


def robust(residuals, starts: Sequence[Sequence[float]]) -> Array:  # type: ignore[no-untyped-def]
    """Least squares of log ratios with outliers damped beyond 10 %, from several starting points."""
    runs = [least_squares(residuals, start, loss="soft_l1", f_scale=0.1) for start in starts]
    return np.asarray(min(runs, key=lambda run: run.cost).x)


def scores(predicted: Array, measured: Array) -> tuple[float, float]:
    """(median absolute relative error, median relative error)."""
    relative = predicted / measured - 1
    return float(np.median(np.abs(relative))), float(np.median(relative))


def three_digits(value: float) -> float:
    """``value`` to three significant digits."""
    return float(f"{value:.3g}")
