"""Fits an Atlas A3 die to the few kernels and collectives measured on one, and hands the numbers to its siblings.

    python -m benchmarks.fit_ascend [FOLDER] [--write]

FOLDER holds ``ascend_a3_{kernels,comm,steps}.csv`` (default ``../shared/validation/ascend``). With a dozen rows a class
there is nothing to hold out: the error printed is that of the fitted rows, each predicted by a fit of the others (leave
one out); a class with one or two rows has none.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from benchmarks.device_sections import write_sections
from benchmarks.fit_op_points import ROOT
from tensor_cast.device.catalog import load_device
from tensor_cast.device.profile import CollectiveFit, DeviceProfile, KernelFit, OpClass
from tensor_cast.device.topology import spans
from tensor_cast.ir.record import Kind, OpRecord, TensorSpec
from tensor_cast.performance_model.base import COSTS, OpCost
from tensor_cast.performance_model.comm_analytic import collective_parts

Array = npt.NDArray[np.float64]
DEVICE = "ATLAS_800_A3_752T_128G_DIE"
DEFAULT_FOLDER = ROOT.parent / "shared" / "validation" / "ascend"
SOURCE = "fit of public Atlas A3 kernel profiles (CANN 8.5, vLLM-Ascend 0.15)"
BF16 = "bfloat16"
#: Share of a rate assumed where measurements tell nothing of that leg.
ASSUMED = 0.7
_SIZES = {"KB": 1024.0, "MB": 1024.0**2}


def read(path: Path) -> list[dict[str, str]]:
    """Rows of a table with ``#`` comments above."""
    with path.open(newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def _cost(name: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], **attrs: object) -> OpCost:
    return COSTS.get(name)(OpRecord(name, "", tuple(inputs), tuple(outputs), attrs=tuple(sorted(attrs.items()))))


def _product(m: int, k: int, n: int, dtype: str) -> OpCost:
    w = TensorSpec((n, k), dtype, Kind.WEIGHT, "w")
    return _cost("aten.linear", [TensorSpec((m, k), dtype), w], [TensorSpec((m, n), BF16)], compute_dtype=dtype)


def _decode(b: int, heads: int, context: int) -> OpCost:
    q, kv = TensorSpec((b, 1, heads, 128), BF16), TensorSpec((b, context, 1, 128), BF16, Kind.KV)
    return _cost("tensor_cast.attention", [q, kv, kv], [q], phase="decode")


def _prefill(requests: int, tokens: int, heads: int) -> OpCost:
    length = tokens / requests
    q = TensorSpec((requests, length, heads, 128), BF16)  # type: ignore[arg-type]
    kv = TensorSpec((requests, length, 1, 128), BF16, Kind.KV)  # type: ignore[arg-type]
    return _cost("tensor_cast.attention", [q, kv, kv], [q], phase="prefill")


def _mla_decode(b: int, heads: int, context: int) -> OpCost:
    q, out = TensorSpec((b, 1, heads, 576), BF16), TensorSpec((b, 1, heads, 512), BF16)
    return _cost("tensor_cast.mla_attention", [q, TensorSpec((b, context, 576), BF16, Kind.KV)], [out], phase="decode")


def _streams(read_elements: float, written: float) -> OpCost:
    return OpCost(OpClass.POINTWISE, bytes_read=2 * read_elements, bytes_written=2 * written)


def kernels(folder: Path) -> dict[str, list[tuple[OpCost, float]]]:
    """(cost, seconds) of each measured kernel by fit key. Contexts are the middle of the range that a row states."""
    out: dict[str, list[tuple[OpCost, float]]] = defaultdict(list)
    for row in read(folder / "ascend_a3_kernels.csv"):
        seconds, kernel, logical = float(row["mean_us"]) * 1e-6, row["kernel"], row["logical"]
        if match := re.fullmatch(r"M(\d+)xK(\d+)xN(\d+)( \(lm_head\))?", logical):
            m, k, n = (int(match[i]) for i in (1, 2, 3))
            dtype = "int8" if row["dtype"] == "int8" else BF16
            out[f"gemm:{dtype}"].append((_product(m, k, n, dtype), seconds))
        elif kernel == "BatchMatMulV2":
            inputs = [TensorSpec((16, 5, 128), BF16), TensorSpec((16, 128, 512), BF16, Kind.WEIGHT, "w")]
            out["batched_gemm"].append((_cost("aten.bmm", inputs, [TensorSpec((16, 5, 512), BF16)]), seconds))
        elif kernel == "FusedInferAttentionScore" and logical.startswith("MLA"):
            out["mla_decode"].append((_mla_decode(5, 16, 4800), seconds))
        elif kernel == "FusedInferAttentionScore" and logical.startswith("causal"):
            out["attention_prefill"].append((_prefill(11, 41_040, 4), seconds))
        elif kernel == "FusedInferAttentionScore":
            out["attention_decode"].append((_decode(16, 4, 4850), seconds))
        elif kernel.endswith("(sampling)"):
            out["sampling_step"].append((_streams(2 * 16 * 151_936, 0), seconds))
        elif match := re.fullmatch(r"(\d+)x(\d+)", logical):
            elements = int(match[1]) * int(match[2])
            written = {"SwiGlu": 0.5, "AddRmsNormBias": 2.0}.get(kernel, 0.5 if "int8" in row["dtype"] else 1.0)
            read_share = 2.0 if kernel in ("Add", "AddRmsNormBias") else 1.0
            out["pointwise"].append((_streams(read_share * elements, written * elements), seconds))
    return dict(out)


def _share(logit: float) -> float:
    return float(1 / (1 + np.exp(-logit)))


def _predict(p: Array, compute: Array, memory: Array, like: KernelFit | None) -> Array:
    """``p``: logit of the compute share and, where no other fit gives them, of the memory share, and the log floor."""
    if like is not None:
        return np.asarray(like.floor_s + np.maximum(compute / _share(p[0]), memory / like.memory))
    return np.asarray(np.exp(p[2]) + np.maximum(compute / _share(p[0]), memory / _share(p[1])))


def _solve(compute: Array, memory: Array, seconds: Array, like: KernelFit | None) -> Array:
    starts = [[e, e, np.log(seconds.min() / 2)][: 1 if like is not None else 3] for e in (0.0, 1.0)]
    runs = [
        least_squares(lambda p: np.log(_predict(p, compute, memory, like) / seconds), s, loss="soft_l1", f_scale=0.1)
        for s in starts
    ]
    return np.asarray(min(runs, key=lambda r: r.cost).x)


def _round(value: float) -> float:
    return float(f"{value:.3g}")


def fit_many(
    device: DeviceProfile, rows: Sequence[tuple[OpCost, float]], *, like: KernelFit | None = None
) -> KernelFit:
    """Floor and shares from a class with several rows; floor and memory share of ``like`` where that is given."""
    rate = device.flops(rows[0][0].compute_dtype) if rows[0][0].compute_dtype else None
    compute = np.array([float(c.flops) / rate if rate else 0.0 for c, _ in rows])
    memory = np.array([float(c.nbytes) / device.memory_bandwidth.value for c, _ in rows])
    seconds = np.array([s for _, s in rows])
    others = [np.arange(len(rows)) != i for i in range(len(rows))]
    guesses = [
        _predict(_solve(compute[o], memory[o], seconds[o], like), compute, memory, like)[i]
        for i, o in enumerate(others)
    ]
    best = _solve(compute, memory, seconds, like)
    return KernelFit(
        floor_s=like.floor_s if like is not None else _round(float(np.exp(best[2]))),
        compute=_round(_share(best[0])) if rate else ASSUMED,
        memory=like.memory if like is not None else _round(_share(best[1])),
        source=f"{SOURCE}, {len(rows)} rows, left out one by one"
        + ("; start and memory share as gemm" if like is not None else ""),
        error=round(float(np.median(np.abs(np.array(guesses) / seconds - 1))), 3),
    )


def fit_one(device: DeviceProfile, cost: OpCost, seconds: float, floor_s: float) -> KernelFit:
    """The share of the leg that bounds a single measured case; the other leg keeps what is assumed."""
    compute = float(cost.flops) / device.flops(cost.compute_dtype)
    memory = float(cost.nbytes) / device.memory_bandwidth.value
    share = min(max(compute, memory) / (seconds - floor_s), 1.0)
    shares = (share, ASSUMED) if compute > memory else (ASSUMED, share)
    return KernelFit(
        floor_s=floor_s, compute=_round(shares[0]), memory=_round(shares[1]), source=f"{SOURCE}, 1 row; rest assumed"
    )


def fit_kernels(device: DeviceProfile, rows: dict[str, list[tuple[OpCost, float]]]) -> dict[str, KernelFit]:
    """Every op class of the device, and int8 products apart."""
    bf16, small = fit_many(device, rows["gemm:bfloat16"]), fit_many(device, rows["pointwise"])
    # The few int8 rows cannot tell their memory share from their start. Fewer bits start no later; the memory is one.
    int8 = fit_many(device, rows["gemm:int8"], like=bf16)
    if int8.compute * device.flops("int8") < bf16.compute * device.flops(BF16):
        int8 = int8.model_copy(update={"compute": bf16.compute * device.flops(BF16) / device.flops("int8")})
    out = {"gemm": bf16, "gemm:int8": int8, "pointwise": small}
    for key in ("attention_prefill", "attention_decode", "mla_decode", "batched_gemm"):
        cost, seconds = rows[key][0]
        out[key] = fit_one(device, cost, seconds, min(bf16.floor_s, seconds / 2))
    steps = rows["sampling_step"]  # the sweeps over the logits that make up one sampling
    sampled = COSTS.get("tensor_cast.sample")(
        OpRecord("tensor_cast.sample", "", (TensorSpec((16, 151_936), BF16),), (TensorSpec((16,), "int64"),))
    )
    taken = sum(seconds for _, seconds in steps)
    out["sampling"] = KernelFit(
        floor_s=small.floor_s,
        compute=ASSUMED,
        memory=_round(float(sampled.nbytes) / device.memory_bandwidth.value / taken),
        source=f"{SOURCE}, {len(steps)} sweeps over 16 x 151,936 logits",
    )
    for key, like in (("moe", "gemm"), ("mla_prefill", "attention_prefill")):
        text = f"not measured; taken from {like}: {out[like].source}"
        out[key] = out[like].model_copy(update={"source": text, "error": None})
    return out


@dataclass(frozen=True)
class Wire:
    """One measured collective: local input bytes, seconds alone, and seconds inside a model."""

    kind: str
    ranks: int
    nbytes: float
    alone_s: float
    model_s: float
    decode: bool


def wires(folder: Path) -> Iterator[Wire]:
    """Measured all-gathers and reduce-scatters; the table gives the outputs of reduce-scatters."""
    for row in read(folder / "ascend_a3_comm.csv"):
        number, unit = re.fullmatch(r"([\d.]+)(KB|MB)", row["per_rank_bytes"]).groups()  # type: ignore[union-attr]
        nbytes, ranks = float(number) * _SIZES[unit], int(row["num_ranks"])
        if row["op"] == "reduce_scatter":
            nbytes *= ranks
        alone, model = float(row["bench_us"]) * 1e-6, float(row["in_model_profiler_us"]) * 1e-6
        yield Wire(row["op"], ranks, nbytes, alone, model, row["context"].startswith("decode"))


def reduces(folder: Path) -> Iterator[tuple[float, float]]:
    """(input bytes, seconds) of an all-reduce inside decode steps of Qwen3-32B over 16 dies: 2 a layer and 1 more."""
    for row in read(folder / "ascend_a3_steps.csv"):
        batch = int(re.search(r"conc(\d+)", row["case"]).group(1))  # type: ignore[union-attr]
        yield batch * 5120 * 2.0, float(row["comm_ms_per_step"]) * 1e-3 / (2 * 64 + 1)


def fit_collectives(
    device: DeviceProfile, rows: Sequence[Wire], steps: Sequence[tuple[float, float]]
) -> dict[str, CollectiveFit]:
    """Every kind as it runs inside a decode step: what it takes alone, and what it waits there.

    Transfer and start come from collectives alone, one share of the links for all kinds: too few rows to tell them
    apart. In a decode step the ranks do not arrive together: a collective takes longer by a wait that does not depend
    on its size. It is measured for all-gathers, and for all-reduces by the communication of whole steps. All kinds have
    it, or those without would look better than they are.
    """
    free = {"alpha_s": 0.0, "alpha_rank_s": 0.0, "efficiency": 1.0, "source": ""}
    bare = device.model_copy(
        update={"collectives": {kind: CollectiveFit.model_validate(free) for kind in device.collectives}}
    )
    parts = [collective_parts(bare, w.kind, w.nbytes, range(w.ranks)) for w in rows]
    hops, transfer = np.array([p[0] for p in parts]), np.array([p[1] for p in parts])
    levels = np.array([len(spans(device, tuple(range(w.ranks)))) for w in rows])
    alone, inside = np.array([w.alone_s for w in rows]), np.array([w.model_s for w in rows])

    def predict(p: Array, pick: npt.NDArray[np.bool_]) -> Array:
        return np.asarray(hops[pick] + levels[pick] * np.exp(p[0]) + transfer[pick] * (1 + np.exp(-p[1])))

    def solve(pick: npt.NDArray[np.bool_]) -> Array:
        run = least_squares(
            lambda p: np.log(predict(p, pick) / alone[pick]), [np.log(5e-6), 0.5], loss="soft_l1", f_scale=0.1
        )
        return np.asarray(run.x)

    one = [np.arange(len(rows)) == i for i in range(len(rows))]
    decode = np.array([w.decode for w in rows])
    wait = float(np.mean((inside - alone)[decode]))
    guesses = np.concatenate([predict(solve(~pick), pick) for pick in one]) + wait
    best = solve(np.ones(len(rows), dtype=bool))
    # The wait is one for a collective, however many levels it runs over: 16 dies have two.
    start = float(np.exp(best[0])) + wait / len(spans(device, tuple(range(16))))
    waits = f"{wait * 1e6:.1f} us of waiting in a decode step ({int(decode.sum())} all-gathers)"
    fit = CollectiveFit(
        alpha_s=_round(start),
        efficiency=_round(float(1 / (1 + np.exp(-best[1])))),
        source=f"{SOURCE.replace('kernel profiles', 'HCCL profiles')}, {len(rows)} all-gathers and reduce-scatters; "
        f"{waits}",
        error=round(float(np.median(np.abs(guesses / inside - 1))), 3),
    )
    other = fit.model_copy(update={"error": None, "source": f"not measured; taken from all_gather: {fit.source}"})
    out = {kind: fit if kind in ("all_gather", "reduce_scatter") else other for kind in device.collectives}
    starts = []
    for nbytes, seconds_in_model in steps:
        hop, moving = collective_parts(bare, "all_reduce", nbytes, range(16))
        # Inner levels start a reduce-scatter and an all-gather each; what is left is the all-reduce's own.
        inner = 2 * (len(spans(device, tuple(range(16)))) - 1)
        starts.append(seconds_in_model - hop - moving / fit.efficiency - inner * fit.alpha_s)
    out["all_reduce"] = CollectiveFit(
        alpha_s=_round(float(np.mean(starts))),
        efficiency=fit.efficiency,
        source=f"start: communication of {len(starts)} public decode steps over 16 dies, waiting included; "
        "links as all_gather",
    )
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns an exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--write", action="store_true", help="update configs/devices")
    args = parser.parse_args(argv)
    if not (args.folder / "ascend_a3_kernels.csv").exists():
        print(f"{args.folder} holds no ascend_a3_kernels.csv; give its folder", file=sys.stderr)
        return 2
    device = load_device(DEVICE)
    fits = fit_kernels(device, kernels(args.folder))
    collectives = fit_collectives(device, list(wires(args.folder)), list(reduces(args.folder)))
    for key, fit in fits.items():
        error = "" if fit.error is None else f"{fit.error:.1%}"
        print(f"{key:20}{fit.floor_s * 1e6:8.2f}us  compute {fit.compute:.2f}  memory {fit.memory:.2f}  {error}")
    for kind in ("all_gather", "all_reduce"):
        wire = collectives[kind]
        error = "" if wire.error is None else f"{wire.error:.1%}"
        print(f"{kind:20}{wire.alpha_s * 1e6:8.2f}us  links {wire.efficiency:.2f}  {error}")
    if args.write:
        for path in write_sections(ROOT / "configs" / "devices", {DEVICE: fits}, {DEVICE: collectives}):
            print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
