"""Fits kernel and collective coefficients to measured op points and writes them into the device files.

    python -m benchmarks.fit_op_points [FOLDER] [--write]

FOLDER holds ``<op>__<system>.csv`` tables (default ``../shared/validation/op_points``). Errors are those of rows a fit
has not seen: rows are dealt into five folds by a hash of what they measured, and each fold is predicted by a fit of the
other four. The coefficients written come from all rows. ``--write`` replaces the ``kernels:`` and ``collectives:``
sections of ``configs/devices/<device>.yaml`` and leaves the rest as it is.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from benchmarks.device_sections import general_keys, write_sections
from benchmarks.op_points import ModuleSample, Sample, WireSample, kernel_samples, module_samples, wire_samples
from tensor_cast.device.catalog import load_device
from tensor_cast.device.profile import CollectiveFit, DeviceProfile, KernelFit, OpClass
from tensor_cast.performance_model.analytic import kernel_seconds
from tensor_cast.performance_model.comm_analytic import wire_bytes

Array = npt.NDArray[np.float64]
ROOT = Path(__file__).resolve().parents[1]
DEFAULT_FOLDER = ROOT.parent / "shared" / "validation" / "op_points"
#: System of the tables -> our device.
SYSTEMS = {"a100_sxm": "A100_80G_SXM", "h100_sxm": "H100_SXM", "h200_sxm": "H200_SXM", "b200_sxm": "B200_SXM"}
SOURCE = "fit of aiconfigurator-core 0.12.0 op tables"
#: Rows needed for a fit, and for a term beyond floor and roofline.
MIN_ROWS, MIN_ROWS_TILES = 15, 30
#: A tile term stays when it lowers the held-out error by this share.
MIN_GAIN = 0.03
FOLDS = 5
#: Software is left out of a fit when its median is slower than the best by this factor.
SLOWER, MIN_ROWS_SOFTWARE = 1.2, 8
#: Blocks short enough for starts to matter, and the least floor that a kernel can have.
SMALL_BLOCK_S, MIN_FLOOR_S = 150e-6, 0.5e-6


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


def _sigmoid(x: float) -> float:
    return float(1 / (1 + np.exp(-x)))


def _robust(residuals, starts: Sequence[Sequence[float]]) -> Array:  # type: ignore[no-untyped-def]
    """Least squares of log ratios with outliers damped beyond 10 %, from several starting points."""
    runs = [least_squares(residuals, start, loss="soft_l1", f_scale=0.1) for start in starts]
    return np.asarray(min(runs, key=lambda run: run.cost).x)


def _scores(predicted: Array, measured: Array) -> tuple[float, float]:
    """(median absolute relative error, median relative error)."""
    relative = predicted / measured - 1
    return float(np.median(np.abs(relative))), float(np.median(relative))


@dataclass(frozen=True)
class _Points:
    """Samples of one kernel class as arrays: roofline legs at full rate (s), tiles, measured seconds."""

    compute: Array
    memory: Array
    tiles: Array
    seconds: Array

    @classmethod
    def of(cls, samples: Sequence[Sample], device: DeviceProfile) -> _Points:
        rate = device.flops(samples[0].cost.compute_dtype)
        flops = [s.cost.flops if s.cost.padded_flops is None else s.cost.padded_flops for s in samples]
        return cls(
            np.array(flops, dtype=float) / rate,
            np.array([s.cost.nbytes for s in samples], dtype=float) / device.memory_bandwidth.value,
            np.array([1.0 if s.cost.tiles is None else s.cost.tiles for s in samples], dtype=float),
            np.array([s.seconds for s in samples]),
        )

    def predict(self, p: Sequence[float] | Array) -> Array:
        """``p``: log floor, logits of the two efficiencies and, with five of them, logs of the two tile counts."""
        compute, memory = self.compute / _sigmoid(p[1]), self.memory / _sigmoid(p[2])
        if len(p) > 3:
            compute = compute * (1 + np.exp(p[3]) / self.tiles)
            memory = memory * (1 + np.exp(p[4]) / self.tiles)
        return np.asarray(np.exp(p[0]) + np.maximum(compute, memory))

    def fit(self, *, tiles: bool) -> Array:
        """Coefficients as :meth:`predict` takes them."""
        log_floor = float(np.log(self.seconds.min()))
        starts = [[log_floor, e, e] for e in (-0.8, 0.8)]
        if tiles:
            starts = [[*start, c, m] for start in starts for c, m in ((0.0, 0.0), (4.0, 0.0))]
        return _robust(lambda p: np.log(self.predict(p) / self.seconds), starts)

    def take(self, rows: npt.NDArray[np.bool_]) -> _Points:
        """The points where ``rows`` is true."""
        return _Points(self.compute[rows], self.memory[rows], self.tiles[rows], self.seconds[rows])

    def unseen(self, folds: npt.NDArray[np.int64], *, tiles: bool) -> tuple[float, float]:
        """(error, bias) of every row as predicted by a fit of the other folds."""
        predicted = np.empty_like(self.seconds)
        for fold in range(FOLDS):
            test = folds == fold
            if test.any():
                predicted[test] = self.take(test).predict(self.take(~test).fit(tiles=tiles))
        return _scores(predicted, self.seconds)


def fit_kernels(device: DeviceProfile, samples: dict[str, list[Sample]]) -> list[Fitted]:
    """One fit per key with enough rows; rows faster than the device's own rates are dropped first."""
    out: list[Fitted] = []
    for key, rows in sorted(samples.items()):
        possible = _best_software([s for s in rows if s.seconds >= max(_bounds(s, device))], device)
        if len(possible) < MIN_ROWS:
            continue
        points = _Points.of(possible, device)
        folds = np.array([fold_of(s.case) for s in possible])
        tiles = False
        error, bias = points.unseen(folds, tiles=False)
        if len(possible) >= MIN_ROWS_TILES:
            richer = points.unseen(folds, tiles=True)
            if richer[0] < error * (1 - MIN_GAIN):
                tiles, (error, bias) = True, richer
        best = points.fit(tiles=tiles)
        tile_terms = {"compute_tiles": _tile(best[3]), "memory_tiles": _tile(best[4])} if tiles else {}
        fit = KernelFit(
            floor_s=_round(float(np.exp(best[0]))),
            compute=_round(_sigmoid(best[1])),
            memory=_round(_sigmoid(best[2])),
            source=f"{SOURCE}, {len(possible)} rows",
            error=round(error, 3),
            **tile_terms,
        )
        out.append(Fitted(device.name, key, len(possible), len(rows) - len(possible), error, bias, fit))
    return out


def _best_software(samples: list[Sample], device: DeviceProfile) -> list[Sample]:
    """Without the software that is slower than the best by more than :data:`SLOWER` in the median.

    Few cases were measured with several libraries, so that the best one cannot be chosen row by row; a serving engine
    picks a library for all of them.
    """
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.software, []).append(sample)
    groups = {name: rows for name, rows in groups.items() if len(rows) >= MIN_ROWS_SOFTWARE}
    if len(groups) < 2:
        return samples
    points = _Points.of(samples, device)
    log_ratio = np.log(points.seconds / points.predict(points.fit(tiles=False)))
    slow = {name: float(np.median(log_ratio[[s.software == name for s in samples]])) for name in groups}
    limit = min(slow.values()) + np.log(SLOWER)
    dropped = {name for name, median in slow.items() if median > limit}
    return [s for s in samples if s.software not in dropped]


def small_kernel_floor(
    device: DeviceProfile, modules: Sequence[ModuleSample], fits: dict[str, KernelFit]
) -> tuple[float, str] | None:
    """(seconds, source) that whole attention blocks leave for each of their small kernels; None without blocks.

    A block of kernels in a captured graph takes less than the sum of its kernels measured alone, since starts overlap.
    """
    small = [m for m in modules if m.seconds < SMALL_BLOCK_S]
    if len(small) < MIN_ROWS:
        return None
    priced = device.model_copy(update={"kernels": {**device.kernels, **fits}})
    left = [(m.seconds - sum(float(kernel_seconds(c, priced)) for c in m.costs)) / m.pointwise for m in small]
    return max(float(np.median(left)), MIN_FLOOR_S), f"what {len(small)} MLA blocks of {device.name} leave, {SOURCE}"


def add_small_kernels(kernels: dict[str, dict[str, KernelFit]], floors: dict[str, tuple[float, str] | None]) -> None:
    """Fits of pointwise ops and sampling: the floor above and the shares that a product reaches.

    A device without measured blocks takes the largest floor of those that have some.
    """
    known = max((floor for floor in floors.values() if floor is not None), default=(MIN_FLOOR_S, "assumed"))
    for name, fits in kernels.items():
        floor, source = floors[name] or known
        gemm = fits["gemm"]
        for op_class in (OpClass.POINTWISE, OpClass.SAMPLING):
            fits[op_class] = KernelFit(
                floor_s=_round(floor),
                compute=gemm.compute,
                memory=gemm.memory,
                source=f"not measured alone; floor: {source}; shares as gemm",
            )


def _bounds(sample: Sample, device: DeviceProfile) -> tuple[float, float]:
    cost = sample.cost
    return (
        float(cost.flops) / device.flops(cost.compute_dtype),
        float(cost.nbytes) / device.memory_bandwidth.value,
    )


def _round(value: float) -> float:
    return float(f"{value:.3g}")


def _tile(log_count: float) -> float:
    count = float(np.exp(log_count))
    return _round(count) if count > 0.05 else 0.0


def fit_collectives(device: DeviceProfile, samples: dict[str, list[WireSample]]) -> list[Fitted]:
    """``alpha + alpha_rank*(n-1) + wire / (bandwidth*efficiency)`` in a node, per kind."""
    bandwidth, hop = device.tiers[0].bandwidth.value, device.tiers[0].latency_s
    out: list[Fitted] = []
    for kind, rows in sorted(samples.items()):
        wire = np.array([wire_bytes(kind, s.nbytes, s.ranks) for s in rows]) / bandwidth
        others = np.array([s.ranks - 1 for s in rows], dtype=float)
        seconds = np.array([s.seconds for s in rows])
        folds = np.array([fold_of((kind, s.ranks, s.nbytes)) for s in rows])
        possible = seconds >= wire

        def predict(p: Array, rows: npt.NDArray[np.bool_], wire: Array = wire, others: Array = others) -> Array:
            return np.asarray(hop + np.exp(p[0]) + np.exp(p[1]) * others[rows] + wire[rows] / _sigmoid(p[2]))

        def fitted(rows: npt.NDArray[np.bool_], seconds: Array = seconds) -> Array:
            starts = [[np.log(5e-6), np.log(r), 0.5] for r in (1e-7, 1e-6)]
            return _robust(lambda p: np.log(predict(p, rows) / seconds[rows]), starts)

        guess = np.zeros_like(seconds)
        for fold in range(FOLDS):
            test = possible & (folds == fold)
            guess[test] = predict(fitted(possible & (folds != fold)), test)
        error, bias = _scores(guess[possible], seconds[possible])
        best = fitted(possible)
        fit = CollectiveFit(
            alpha_s=_round(float(np.exp(best[0]))),
            alpha_rank_s=_round(float(np.exp(best[1]))),
            efficiency=_round(_sigmoid(best[2])),
            source=f"{SOURCE}, {int(possible.sum())} sizes, one node",
            error=round(error, 3),
        )
        out.append(Fitted(device.name, kind, int(possible.sum()), int((~possible).sum()), error, bias, fit))
    return out


def print_table(lines: Sequence[Fitted]) -> None:
    """Coefficients and held-out errors of every fit."""
    print(f"{'device':14}{'key':34}{'rows':>5}{'out':>5}{'start':>9}{'comp':>7}{'mem/link':>9}{'tiles':>14}", end="")
    print(f"{'error':>8}{'bias':>8}")
    for line in lines:
        fit = line.fit
        if isinstance(fit, KernelFit):
            start, compute, memory = fit.floor_s, f"{fit.compute:.2f}", fit.memory
            tiles = f"{fit.compute_tiles:g}/{fit.memory_tiles:g}" if fit.compute_tiles or fit.memory_tiles else "-"
        else:
            start, compute, memory = fit.alpha_s, "", fit.efficiency
            tiles = f"+{fit.alpha_rank_s * 1e6:.2f}us/rank"
        print(f"{line.device:14}{line.key:34}{line.rows:5d}{line.dropped:5d}{start * 1e6:7.1f}us{compute:>7}", end="")
        print(f"{memory:9.2f}{tiles:>14}{line.error:8.1%}{line.bias:+8.1%}")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns an exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--write", action="store_true", help="update configs/devices")
    args = parser.parse_args(argv)
    if not any(args.folder.glob("*__*.csv")):
        print(f"{args.folder} holds no op tables (<op>__<system>.csv); give their folder", file=sys.stderr)
        return 2
    lines: list[Fitted] = []
    kernels: dict[str, dict[str, KernelFit]] = {}
    collectives: dict[str, dict[str, CollectiveFit]] = {}
    floors: dict[str, tuple[float, str] | None] = {}
    for system, name in SYSTEMS.items():
        device = load_device(name)
        local = fit_kernels(device, kernel_samples(args.folder, system))
        wires = fit_collectives(device, wire_samples(args.folder, system))
        fits = general_keys({line.key: line.fit for line in local if isinstance(line.fit, KernelFit)})
        floors[name] = small_kernel_floor(device, module_samples(args.folder, system), fits)
        kernels[name] = fits
        collectives[name] = {line.key: line.fit for line in wires if isinstance(line.fit, CollectiveFit)}
        lines += [*local, *wires]
    add_small_kernels(kernels, floors)
    print_table(lines)
    if args.write:
        for path in write_sections(ROOT / "configs" / "devices", kernels, collectives):
            print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
