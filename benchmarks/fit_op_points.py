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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.device_sections import general_keys, write_sections
from benchmarks.fitting import SOURCE, Array, Fitted, fold_of, scores, three_digits
from benchmarks.kernel_fits import Coefficients, Limits, Points, Problem, kernel_fit, partner_shares, points_of, untold
from benchmarks.op_points import ModuleSample, Sample, kernel_samples, module_samples, wire_samples
from benchmarks.wire_fits import fit_collectives
from tensor_cast.device.catalog import load_device
from tensor_cast.device.profile import CollectiveFit, DeviceProfile, KernelFit, OpClass
from tensor_cast.performance_model.analytic import kernel_seconds

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_FOLDER = ROOT.parent / "shared" / "validation" / "op_points"
#: System of the tables -> our device.
SYSTEMS = {"a100_sxm": "A100_80G_SXM", "h100_sxm": "H100_SXM", "h200_sxm": "H200_SXM", "b200_sxm": "B200_SXM"}
#: Architecture -> systems that run its kernels; a system is no slower than those of the architecture before it, where
#: there is one.
ARCHITECTURES = {"sm80": ("a100_sxm",), "sm90": ("h100_sxm", "h200_sxm"), "sm100": ("b200_sxm",)}
OLDER = {"sm100": "sm90"}
#: Collectives over one kind of links and switches start alike: rows of these architectures share their starts.
LINK_FAMILIES = (("sm80",), ("sm90", "sm100"))
#: Dtype (or kernel family) of a fit -> those of more bits, which it is nowhere slower than.
WIDER = {
    "float8_e4m3fn": ("bfloat16",),
    "fp8_block": ("bfloat16",),
    "float4_e2m1fn": ("bfloat16", "float8_e4m3fn", "fp8_block"),
}
#: Rows needed for a fit, and for a term beyond floor and roofline.
MIN_ROWS, MIN_ROWS_TILES = 15, 30
#: A tile term stays when it lowers the held-out error by this share.
MIN_GAIN = 0.03
#: Software is left out of a fit when its median is slower than the best by this factor.
SLOWER, MIN_ROWS_SOFTWARE = 1.2, 8
#: Blocks short enough for starts to matter, and the least floor that a kernel can have.
SMALL_BLOCK_S, MIN_FLOOR_S = 150e-6, 0.5e-6


def _rows(samples: Sequence[Sample], device: DeviceProfile) -> Points:
    costs = [
        (
            float(s.cost.flops if s.cost.padded_flops is None else s.cost.padded_flops),
            float(s.cost.nbytes),
            1.0 if s.cost.tiles is None else float(s.cost.tiles),
            float(next(n for n in (s.cost.streams, s.cost.tiles, 1.0) if n is not None)),
            s.seconds,
        )
        for s in samples
    ]
    return points_of(costs, samples[0].cost.compute_dtype, device)


def _best_software(
    samples: Mapping[str, list[Sample]], devices: Mapping[str, DeviceProfile]
) -> dict[str, list[Sample]]:
    """Rows by device, without the software that is slower than the best by more than :data:`SLOWER` in the median.

    Few cases were measured with several libraries, so that the best one cannot be chosen row by row; a serving engine
    picks a library for all of them. The choice is one for all devices of an architecture.
    """
    software = [s.software for rows in samples.values() for s in rows]
    names = {name for name in software if software.count(name) >= MIN_ROWS_SOFTWARE}
    if len(names) < 2:
        return dict(samples)
    points = Points.joined([_rows(rows, devices[name]) for name, rows in samples.items()])
    log_ratio = np.log(points.seconds / Problem(points, Limits(), tiles=True).solve().predict(points))
    slow = {name: float(np.median(log_ratio[[s == name for s in software]])) for name in names}
    limit = min(slow.values()) + np.log(SLOWER)
    dropped = {name for name, median in slow.items() if median > limit}
    return {name: [s for s in rows if s.software not in dropped] for name, rows in samples.items()}


@dataclass(frozen=True)
class _Class:
    """Rows of one key in one architecture, device by device."""

    samples: dict[str, list[Sample]]
    points: dict[str, Points]
    dropped: dict[str, int]
    dtype: str

    def along(self, devices: Mapping[str, DeviceProfile], floor_s: float, gemm: Coefficients) -> _Class:
        """With the time of what was measured along with it, as small kernels are priced."""
        points = {
            name: replace(
                points,
                other=np.array(
                    [
                        0.0
                        if s.along is None
                        else floor_s + float(s.along.nbytes) / devices[name].memory_bandwidth.value / gemm.memory
                        for s in self.samples[name]
                    ]
                ),
            )
            for name, points in self.points.items()
        }
        return replace(self, points=points)

    @property
    def joined(self) -> Points:
        return Points.joined(list(self.points.values()))

    @property
    def folds(self) -> npt.NDArray[np.int64]:
        # One case measured on two devices is one case: its folds must not see each other.
        systems = set(SYSTEMS)
        cases = [tuple(v for v in s.case if v not in systems) for rows in self.samples.values() for s in rows]
        return np.array([fold_of(case) for case in cases])


def _classes(devices: Mapping[str, DeviceProfile], samples: Mapping[str, dict[str, list[Sample]]]) -> dict[str, _Class]:
    """Classes with rows enough, the wide dtypes first."""
    out: dict[str, _Class] = {}
    keys = sorted(
        {key for rows in samples.values() for key in rows}, key=lambda key: (len(WIDER.get(_dtype(key), ())), key)
    )
    for key in keys:
        # Rows faster than the device's own rates measured something else.
        possible = {
            name: [s for s in rows.get(key, ()) if s.seconds >= max(_bounds(s, devices[name]))]
            for name, rows in samples.items()
        }
        possible = {name: rows for name, rows in possible.items() if rows}
        kept = {name: rows for name, rows in _best_software(possible, devices).items() if rows}
        if sum(map(len, kept.values())) < MIN_ROWS:
            continue
        out[key] = _Class(
            kept,
            {name: _rows(rows, devices[name]) for name, rows in kept.items()},
            {name: len(samples[name][key]) - len(rows) for name, rows in kept.items()},
            next(iter(kept.values()))[0].cost.compute_dtype,
        )
    return out


def _dtype(key: str) -> str:
    return key.partition(":")[2]


@dataclass(frozen=True)
class Architecture:
    """What was fitted for devices that run the same kernels: coefficients by key with their sources.

    ``small`` is the start of a small kernel with its source, None without measured blocks.
    """

    name: str
    devices: Mapping[str, DeviceProfile]
    fits: Mapping[str, Coefficients]
    sources: Mapping[str, str]
    small: tuple[float, str] | None
    lines: Sequence[Fitted]

    def kernels(self, device: str) -> dict[str, KernelFit]:
        """As the device's file holds them."""
        errors = {line.key: line.error for line in self.lines if line.device == device}
        return general_keys({k: kernel_fit(c, self.sources[k], errors.get(k)) for k, c in self.fits.items()})


def fit_kernels(
    name: str,
    devices: Mapping[str, DeviceProfile],
    samples: Mapping[str, dict[str, list[Sample]]],
    modules: Mapping[str, Sequence[ModuleSample]],
    older: Architecture | None = None,
) -> Architecture:
    """One set of coefficients per key for all ``devices``.

    A key with too few rows is left out. Errors are of rows that the fit has not seen, device by device.
    """
    classes = _classes(devices, samples)
    legs = {key: untold(c.joined) for key, c in classes.items()}
    # A first pass finds what other classes tell of a leg, and the start of a small kernel; the second uses both.
    shares = {key: {leg: (value, "") for leg, value in fixed.items()} for key, fixed in legs.items()}
    first = _fit_all(name, devices, classes, shares, older, search=False)
    small = _small_kernel(devices, modules, first, older)
    if small is not None:
        classes = {key: group.along(devices, small[0], first.fits["gemm:bfloat16"]) for key, group in classes.items()}
    shares = {key: partner_shares(key, fixed, first.fits, legs) for key, fixed in legs.items()}
    return replace(_fit_all(name, devices, classes, shares, older, search=True), small=small)


def _fit_all(
    name: str,
    devices: Mapping[str, DeviceProfile],
    classes: Mapping[str, _Class],
    shares: Mapping[str, Mapping[str, tuple[float, str]]],
    older: Architecture | None,
    *,
    search: bool,
) -> Architecture:
    fits: dict[str, Coefficients] = {}
    lines: list[Fitted] = []
    for key, group in classes.items():
        limits = _limits(key, group.dtype, next(iter(devices.values())), fits, classes, older)
        problem = Problem(group.joined, limits, {leg: share for leg, (share, _) in shares[key].items()})
        fits[key], unseen = _fit_class(problem, group.folds, search=search)
        lines += _lines(name, key, group, fits[key], unseen, shares[key])
    return Architecture(name, devices, fits, {line.key: line.fit.source for line in lines}, None, lines)


def _limits(
    key: str,
    dtype: str,
    device: DeviceProfile,
    fits: Mapping[str, Coefficients],
    classes: Mapping[str, _Class],
    older: Architecture | None,
) -> Limits:
    limits = Limits()
    op_class = key.partition(":")[0]
    for wide in WIDER.get(_dtype(key), ()):
        name = f"{op_class}:{wide}"
        if name in fits:
            limits = limits.within(
                fits[name], rate=device.flops(dtype) / device.flops(classes[name].dtype), bandwidth=1
            )
    if older is not None and key in older.fits:
        for old in older.devices.values():
            limits = limits.within(
                older.fits[key],
                rate=device.flops(dtype) / old.flops(dtype),
                bandwidth=device.memory_bandwidth.value / old.memory_bandwidth.value,
            )
    return limits


def _fit_class(problem: Problem, folds: npt.NDArray[np.int64], *, search: bool) -> tuple[Coefficients, Array]:
    """(coefficients, what a fit of other rows says of each row), with tile terms where they help."""
    measured = problem.points.seconds
    richer = replace(problem, tiles=len(measured) >= MIN_ROWS_TILES)
    if not search:
        return richer.solve().rounded(), measured
    unseen = problem.unseen(folds)
    if richer.tiles:
        better = richer.unseen(folds)
        if scores(better, measured)[0] < scores(unseen, measured)[0] * (1 - MIN_GAIN):
            return richer.solve().rounded(), better
    return problem.solve().rounded(), unseen


def _lines(
    architecture: str,
    key: str,
    group: _Class,
    best: Coefficients,
    unseen: Array,
    shares: Mapping[str, tuple[float, str]],
) -> list[Fitted]:
    counts = {name: len(points.seconds) for name, points in group.points.items()}
    rows = " and ".join(f"{count} of {name}" for name, count in counts.items())
    source = f"{SOURCE}, {architecture}: {rows}"
    for leg, (_, partner) in shares.items():
        taken = f"as {partner}" if partner else "assumed"
        source += f"; {leg} share {taken}, no rows are bound by it"
    out, start = [], 0
    for name, points in group.points.items():
        predicted = unseen[start : start + counts[name]]
        start += counts[name]
        error, bias = scores(predicted, points.seconds)
        out.append(Fitted(name, key, counts[name], group.dropped[name], error, bias, kernel_fit(best, source, error)))
    return out


def left_over(device: DeviceProfile, modules: Sequence[ModuleSample], fits: Mapping[str, KernelFit]) -> list[float]:
    """Seconds that each short attention block leaves for each of its small kernels.

    A block of kernels in a captured graph takes less than the sum of its kernels measured alone, since starts overlap.
    """
    priced = device.model_copy(update={"kernels": {**device.kernels, **fits}})
    small = [m for m in modules if m.seconds < SMALL_BLOCK_S]
    return [(m.seconds - sum(float(kernel_seconds(c, priced)) for c in m.costs)) / m.pointwise for m in small]


def _small_kernel(
    devices: Mapping[str, DeviceProfile],
    modules: Mapping[str, Sequence[ModuleSample]],
    fitted: Architecture,
    older: Architecture | None,
) -> tuple[float, str] | None:
    """(seconds, source) of a small kernel's start: blocks of all devices together; no more than the older one's."""
    left = {name: left_over(device, modules[name], fitted.kernels(name)) for name, device in devices.items()}
    values = [value for rows in left.values() for value in rows]
    before = older.small if older is not None else None
    if len(values) < MIN_ROWS:
        return before
    names = " and ".join(f"{len(rows)} MLA blocks of {name}" for name, rows in left.items())
    own = max(float(np.median(values)), MIN_FLOOR_S), f"what {names} leave, {SOURCE}"
    return before if before is not None and before[0] < own[0] else own


def add_small_kernels(
    kernels: Mapping[str, dict[str, KernelFit]], floors: Mapping[str, tuple[float, str] | None]
) -> None:
    """Fits of pointwise ops and sampling: the start above and the shares that a product reaches.

    A device without measured blocks takes the largest start of those that have some.
    """
    known = max((floor for floor in floors.values() if floor is not None), default=(MIN_FLOOR_S, "assumed"))
    for name, fits in kernels.items():
        floor, source = floors[name] or known
        gemm = fits["gemm"]
        for op_class in (OpClass.POINTWISE, OpClass.SAMPLING):
            fits[op_class] = KernelFit(
                floor_s=three_digits(floor),
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
    devices = {system: load_device(name) for system, name in SYSTEMS.items()}
    lines: list[Fitted] = []
    found: dict[str, Architecture] = {}
    kernels: dict[str, dict[str, KernelFit]] = {}
    floors: dict[str, tuple[float, str] | None] = {}
    for architecture, systems in ARCHITECTURES.items():
        fitted = found[architecture] = fit_kernels(
            architecture,
            {devices[s].name: devices[s] for s in systems},
            {devices[s].name: kernel_samples(args.folder, s) for s in systems},
            {devices[s].name: module_samples(args.folder, s) for s in systems},
            found.get(OLDER.get(architecture, "")),
        )
        lines += fitted.lines
        for name in fitted.devices:
            kernels[name], floors[name] = fitted.kernels(name), fitted.small
    add_small_kernels(kernels, floors)
    collectives: dict[str, dict[str, CollectiveFit]] = {}
    for family in LINK_FAMILIES:
        members = [s for architecture in family for s in ARCHITECTURES[architecture]]
        wires = fit_collectives(
            {devices[s].name: devices[s] for s in members},
            {devices[s].name: wire_samples(args.folder, s) for s in members},
        )
        lines += wires
        for line in wires:
            if isinstance(line.fit, CollectiveFit):
                collectives.setdefault(line.device, {})[line.key] = line.fit
    print_table(lines)
    if args.write:
        for path in write_sections(ROOT / "configs" / "devices", kernels, collectives):
            print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
