"""Predicted against measured decode of whole sparse-attention blocks, none of which went into a fit.

    python -m benchmarks.dsa_modules [FOLDER] [--rows]

FOLDER holds ``raw_dsa_generation_module__<system>.csv`` tables (default ``../shared/validation/op_points``). A block is
everything of a layer's attention between its norm and the all_reduce: projections, indexer with scores and top-k, cache
writes, sparse attention. It is priced as the trace of the whole model has it. Errors are predicted / measured - 1.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.fit_op_points import DEFAULT_FOLDER, SYSTEMS
from benchmarks.op_points import read_rows
from tensor_cast.core.trace_library import TraceLibrary
from tensor_cast.device.catalog import load_device
from tensor_cast.engine.catalog import load_engine
from tensor_cast.ir.program import Layout
from tensor_cast.ir.record import Phase
from tensor_cast.model_catalog import load_model_config
from tensor_cast.model_config import ParallelConfig
from tensor_cast.performance_model.estimate import StepEstimator
from tensor_cast.quant import QuantConfig

TABLE = "raw_dsa_generation_module"
#: Models of the tables with the number of heads, of which the tables give a rank's.
HEADS = {"deepseek-ai/DeepSeek-V3.2": 128, "zai-org/GLM-5": 64}
LINEAR = {"bfloat16": "DISABLED", "fp8_block": "FP8_BLOCK"}
CACHE = {"bfloat16": "DISABLED", "fp8": "FP8"}


@cache
def library(model: str) -> TraceLibrary:
    """The traces of a model, shared by all rows."""
    return TraceLibrary(load_model_config(model))


@cache
def estimator(model: str, tp: int, linear: str, kv: str, device: str) -> StepEstimator:
    """Decode of one rank."""
    engine = load_engine("vllm")
    config, parallel = load_model_config(model), ParallelConfig(tensor_parallel_size=tp)
    layout = Layout(parallel, Phase.DECODE, "vllm", engine.block_size_for(config.attention), 0)
    return StepEstimator(
        library(model).compose(layout),
        device=load_device(device),
        engine=engine,
        parallel=parallel,
        quant=QuantConfig.resolve(config, LINEAR[linear], CACHE[kv]),
    )


def block_seconds(step: StepEstimator, requests: int, context: int) -> float:
    """Seconds of the attention block of layer 0, which chooses tokens itself in every model of the tables."""
    ops = step.estimate({"B": float(requests), "Q": 1.0, "S": float(context)}).ops
    mine = [op for op in ops if op.layers and op.layers[0] == 0 and "self_attn" in op.module]
    return sum(op.total_s / len(op.layers) for op in mine if "all_reduce" not in op.name)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns an exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--rows", action="store_true", help="print every row")
    args = parser.parse_args(argv)
    if not any(args.folder.glob(f"{TABLE}__*.csv")):
        print(f"{args.folder} holds no {TABLE}__<system>.csv; give the folder of the op tables", file=sys.stderr)
        return 2
    errors: dict[tuple[str, str], list[float]] = defaultdict(list)
    left_out: Counter[str] = Counter()
    for system, device in SYSTEMS.items():
        for row in read_rows(args.folder, TABLE, system):
            model = row["model"]
            if row["op"].endswith("skip_indexer") or model not in HEADS or row["gemm_type"] not in LINEAR:
                left_out["blocks without an indexer, other models and weights"] += 1
                continue
            tp, odd = divmod(HEADS[model], int(row["num_heads"]))
            if odd:
                left_out[f"{row['num_heads']} heads on a rank, {model} has {HEADS[model]}"] += 1
                continue
            context = int(row["isl"]) + int(row["step"])
            step = estimator(model, tp, row["gemm_type"], row["kv_cache_dtype"], device)
            seconds, measured = block_seconds(step, int(row["batch_size"]), context), float(row["latency_ms"]) * 1e-3
            errors[device, row["backend"]].append(seconds / measured - 1)
            if args.rows:
                what = f"{device:10} {row['backend']:7} {model:28} {row['gemm_type']:9} {row['kv_cache_dtype']:8}"
                print(
                    f"{what} heads {row['num_heads']:>3} B {row['batch_size']:>4} S {context:>6}  "
                    f"{seconds * 1e6:8.1f} of {measured * 1e6:8.1f} us {seconds / measured - 1:+7.1%}"
                )
    print(f"{'device':12}{'kernels':10}{'rows':>5}{'median':>9}{'of sizes':>10}")
    for (device, backend), found in sorted(errors.items()):
        print(f"{device:12}{backend:10}{len(found):5d}{np.median(found):+9.1%}{np.median(np.abs(found)):10.1%}")
    for reason, count in left_out.items():
        print(f"left out, {count} rows: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
