"""Coefficients of collectives inside a node: a start, more of it for each further rank, and a share of the links."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from benchmarks.fitting import FOLDS, SOURCE, Array, Fitted, fold_of, robust, scores, three_digits
from benchmarks.op_points import WireSample
from tensor_cast.device.profile import CollectiveFit, DeviceProfile
from tensor_cast.performance_model.comm_analytic import wire_bytes


def _sigmoid(x: float) -> float:
    return float(1 / (1 + np.exp(-x)))


def fit_collectives(
    devices: Mapping[str, DeviceProfile], samples: Mapping[str, dict[str, list[WireSample]]]
) -> list[Fitted]:
    """``alpha + alpha_rank*(n-1) + wire / (bandwidth*efficiency)`` in a node, per kind.

    ``devices`` have links and switches of one kind: they share both starts, and those of one bandwidth the share too.
    """
    speeds = sorted({d.tiers[0].bandwidth.value for d in devices.values()})
    out: list[Fitted] = []
    for kind in sorted({kind for rows in samples.values() for kind in rows}):
        rows = [(name, s) for name in devices for s in samples[name].get(kind, [])]
        bandwidth = np.array([devices[name].tiers[0].bandwidth.value for name, _ in rows])
        hop = np.array([devices[name].tiers[0].latency_s for name, _ in rows])
        wire = np.array([float(wire_bytes(kind, s.nbytes, s.ranks)) for _, s in rows]) / bandwidth
        others = np.array([s.ranks - 1 for _, s in rows], dtype=float)
        seconds = np.array([s.seconds for _, s in rows])
        speed = np.searchsorted(speeds, bandwidth)
        folds = np.array([fold_of((kind, s.ranks, s.nbytes)) for _, s in rows])
        possible = seconds >= wire

        def predict(p: Array, pick: npt.NDArray[np.bool_]) -> Array:
            share = 1 / (1 + np.exp(-p[2:]))
            moving = wire[pick] / share[speed[pick]]  # noqa: B023
            return np.asarray(hop[pick] + np.exp(p[0]) + np.exp(p[1]) * others[pick] + moving)  # noqa: B023

        def fitted(pick: npt.NDArray[np.bool_]) -> Array:
            starts = [[np.log(5e-6), np.log(r), *([0.5] * len(speeds))] for r in (1e-7, 1e-6)]
            return robust(lambda p: np.log(predict(p, pick) / seconds[pick]), starts)  # noqa: B023

        guess = np.zeros_like(seconds)
        for fold in range(FOLDS):
            test = possible & (folds == fold)
            guess[test] = predict(fitted(possible & (folds != fold)), test)
        best = fitted(possible)
        counts = {
            name: int(sum(ok for (n, _), ok in zip(rows, possible, strict=True) if n == name)) for name in devices
        }
        text = " and ".join(f"{count} of {name}" for name, count in counts.items())
        for name, device in devices.items():
            mine = possible & np.array([n == name for n, _ in rows])
            error, bias = scores(guess[mine], seconds[mine])
            fit = CollectiveFit(
                alpha_s=three_digits(float(np.exp(best[0]))),
                alpha_rank_s=three_digits(float(np.exp(best[1]))),
                efficiency=three_digits(_sigmoid(best[2 + speeds.index(device.tiers[0].bandwidth.value)])),
                source=f"{SOURCE}, sizes in a node: {text}" + ("; one start for both" if len(devices) > 1 else ""),
                error=round(error, 3),
            )
            out.append(
                Fitted(name, kind, counts[name], len(samples[name].get(kind, [])) - counts[name], error, bias, fit)
            )
    return out
