"""Coefficients of kernel classes, one set for all devices of an architecture, within what other fits already tell.

Three rules keep the fits from contradicting each other:

- devices of one architecture run the same kernels, so their rows are fitted together, each at its own device's rates;
- a leg of the roofline that bounds too few rows is not fitted: it takes the share of a class that does the same work
  (:data:`PARTNERS`), and the source says so;
- a kernel for fewer bits could widen its operands, and a newer device could run the older kernels, so neither is
  slower than what it replaces, at any size: such fits are bounds (:class:`Limits`) for the next one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from tensor_cast.device.profile import DeviceProfile, KernelFit

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

#: Class -> the one whose share of the same leg it takes where its own rows do not tell.
PARTNERS: dict[tuple[str, str], str] = {
    ("attention_decode", "compute"): "attention_prefill",
    ("attention_prefill", "memory"): "attention_decode",
    ("mla_decode", "compute"): "mla_prefill",
    ("mla_prefill", "memory"): "mla_decode",
    ("batched_gemm", "compute"): "gemm",
    ("batched_gemm", "memory"): "gemm",
    ("moe", "compute"): "gemm",
    ("moe", "memory"): "gemm",
}
#: Share of a leg that nothing tells.
ASSUMED = 0.7
#: A row tells about a leg that is the longer of the two and at least this share of what was measured; so many must.
TELLING, MIN_TELLING = 0.15, 10
#: The least and the largest start that a kernel can have, and the most tiles that keep half a device busy.
FLOOR_S, MAX_TILES = (1e-6, 100e-6), 1000.0
#: Pull of each coefficient towards the middle of its range, against one of a log ratio per row.
RIDGE = 0.02


@dataclass(frozen=True)
class Points:
    """Measured kernels of one class: roofline legs at full rate (s), tiles and streams, measured seconds; one row each.

    ``other`` holds the seconds of another kernel that was measured along with it (the quantisation of its input).
    """

    compute: Array
    memory: Array
    tiles: Array
    streams: Array
    seconds: Array
    other: Array

    @classmethod
    def joined(cls, parts: Sequence[Points]) -> Points:
        """All rows of ``parts``."""
        return cls(*(np.concatenate([getattr(p, name) for p in parts]) for name in cls.__dataclass_fields__))

    def take(self, rows: Mask) -> Points:
        """The rows where ``rows`` is true."""
        return Points(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    def tells(self, leg: str) -> bool:
        """Whether enough rows are bound by ``leg`` to fit its share."""
        own, other = (self.compute, self.memory) if leg == "compute" else (self.memory, self.compute)
        return int(np.sum((own > other) & (own > TELLING * self.seconds))) >= MIN_TELLING


@dataclass(frozen=True)
class Coefficients:
    """What a :class:`KernelFit` holds, in numbers."""

    floor_s: float
    compute: float
    memory: float
    compute_tiles: float = 0.0
    memory_tiles: float = 0.0

    def predict(self, p: Points) -> Array:
        """Seconds of each row."""
        compute = p.compute / self.compute * (1 + self.compute_tiles / p.tiles)
        memory = p.memory / self.memory * (1 + self.memory_tiles / p.streams)
        return np.asarray(p.other + self.floor_s + np.maximum(compute, memory))

    def rounded(self) -> Coefficients:
        """Three digits, each to the faster side, so that rounding breaks no bound."""
        return Coefficients(
            _digits(self.floor_s, math.floor),
            min(_digits(self.compute, math.ceil), 1.0),
            min(_digits(self.memory, math.ceil), 1.0),
            _digits(self.compute_tiles, math.floor),
            _digits(self.memory_tiles, math.floor),
        )


def _digits(value: float, direction: Callable[[float], int]) -> float:
    if value < 1e-9:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return float(f"{direction(round(value / unit, 6)) * unit:.3g}")


@dataclass(frozen=True)
class Limits:
    """Bounds under which a kernel is nowhere slower than each of some others, given no more FLOPs and bytes.

    A leg is ``work / (rate*share) * (1 + n0/n)``, so it is no longer than another's for every number of tiles n when
    neither ``1 / (rate*share)`` nor ``n0 / (rate*share)`` is larger.
    """

    floor_s: float = FLOOR_S[1]
    compute: float = 0.0
    memory: float = 0.0
    #: largest ``n0 / share`` of each leg
    compute_tiles: float = math.inf
    memory_tiles: float = math.inf

    def within(self, fit: Coefficients, *, rate: float, bandwidth: float) -> Limits:
        """Also no slower than ``fit``; FLOP/s are ``rate`` times those it runs at, the memory ``bandwidth`` times."""
        return Limits(
            min(self.floor_s, fit.floor_s),
            max(self.compute, fit.compute / rate),
            max(self.memory, fit.memory / bandwidth),
            min(self.compute_tiles, fit.compute_tiles / fit.compute * rate),
            min(self.memory_tiles, fit.memory_tiles / fit.memory * bandwidth),
        )


def _sigmoid(x: float) -> float:
    return float(1 / (1 + np.exp(-np.clip(x, -40, 40))))


@dataclass(frozen=True)
class Problem:
    """One class of one architecture. ``fixed`` holds the shares of legs that its rows do not tell."""

    points: Points
    limits: Limits
    fixed: Mapping[str, float] = field(default_factory=dict)
    tiles: bool = False

    def coefficients(self, p: Sequence[float] | Array) -> Coefficients:
        """Unbounded parameters mapped into the bounds."""
        least = min(FLOOR_S[0], self.limits.floor_s)
        floor = least * (self.limits.floor_s / least) ** _sigmoid(p[0])
        shares = {}
        for leg, x in (("compute", p[1]), ("memory", p[2])):
            low = min(getattr(self.limits, leg), 1.0)
            shares[leg] = max(self.fixed[leg], low) if leg in self.fixed else low + (1 - low) * _sigmoid(x)
        counts = {"compute": 0.0, "memory": 0.0}
        if self.tiles:
            for leg, x in (("compute", p[3]), ("memory", p[4])):
                most = min(getattr(self.limits, f"{leg}_tiles") * shares[leg], MAX_TILES)
                # Half of the range in logs: counts of 1 and of 100 tiles are as likely.
                counts[leg] = 0.0 if leg in self.fixed else most * _sigmoid(x)
        return Coefficients(floor, shares["compute"], shares["memory"], counts["compute"], counts["memory"])

    def solve(self) -> Coefficients:
        """Least squares of log ratios, outliers damped beyond 10 %, from several starting points."""
        measured = np.log(self.points.seconds)

        def residuals(p: Array) -> Array:
            return np.concatenate([np.log(self.coefficients(p).predict(self.points)) - measured, RIDGE * p])

        starts = [[x, e, e, *tail] for x, e in ((0.0, 0.0), (1.0, 1.5)) for tail in self._tile_starts()]
        runs = [least_squares(residuals, start, loss="soft_l1", f_scale=0.1) for start in starts]
        return self.coefficients(min(runs, key=lambda run: run.cost).x)

    def _tile_starts(self) -> list[list[float]]:
        return [[-4.0, -4.0], [-2.5, -5.0]] if self.tiles else [[]]

    def unseen(self, folds: npt.NDArray[np.int64]) -> Array:
        """Seconds of every row as predicted by a fit of the other folds."""
        predicted = np.empty_like(self.points.seconds)
        for fold in np.unique(folds):
            test = folds == fold
            trained = replace(self, points=self.points.take(~test)).solve()
            predicted[test] = trained.predict(self.points.take(test))
        return predicted


def untold(points: Points) -> dict[str, float]:
    """Legs that no row tells, with what is assumed of them for now."""
    return {leg: ASSUMED for leg in ("compute", "memory") if not points.tells(leg)}


def partner_shares(
    key: str, fixed: Mapping[str, float], told: Mapping[str, Coefficients], untold_of: Mapping[str, Mapping[str, float]]
) -> dict[str, tuple[float, str]]:
    """(share, class it is taken from or "") of each untold leg of ``key``."""
    out: dict[str, tuple[float, str]] = {}
    op_class, _, dtype = key.partition(":")
    for leg in fixed:
        partner = PARTNERS.get((op_class, leg), op_class if dtype not in ("", "bfloat16") else "")
        names = [f"{partner}:{dtype}", f"{partner}:bfloat16", partner]
        found = next((n for n in names if n != key and n in told and leg not in untold_of[n]), None)
        out[leg] = (getattr(told[found], leg), found) if found else (ASSUMED, "")
    return out


def kernel_fit(best: Coefficients, source: str, error: float | None) -> KernelFit:
    """As device files hold it."""
    tiles = {n: v for n in ("compute_tiles", "memory_tiles") if (v := getattr(best, n)) > 0}
    return KernelFit(
        floor_s=best.floor_s,
        compute=best.compute,
        memory=best.memory,
        source=source,
        error=None if error is None else round(error, 3),
        **tiles,
    )


def points_of(costs: Sequence[tuple[float, float, float, float, float]], dtype: str, device: DeviceProfile) -> Points:
    """Rows of (FLOPs, bytes, tiles, streams, seconds) at the device's own rates."""
    flops, nbytes, tiles, streams, seconds = np.array(costs, dtype=float).reshape(-1, 5).T
    bandwidth = device.memory_bandwidth.value
    return Points(flops / device.flops(dtype), nbytes / bandwidth, tiles, streams, seconds, np.zeros_like(seconds))
