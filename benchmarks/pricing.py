"""How many (layout, batch) points a second the search prices once everything is traced.

    python -m benchmarks.pricing [--model deepseek-ai/DeepSeek-R1] [--num-devices 32] [--runs 5]

Counts every batch size of every legal layout; the clock runs over pricing, memory and steady state, with nothing kept
from the run before. Traces are made first and do not count.
"""

from __future__ import annotations

import argparse
import statistics
import time

from serving_cast.config import OptimizerConfig, SearchSpace, Workload
from serving_cast.parallel_runner import ParallelRunner
from serving_cast.setting import make_setting
from tensor_cast.performance_model.estimate import clear_memos


def main() -> None:
    """Print the rate of each run and the median."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deepseek-ai/DeepSeek-R1", help="hub id (default DeepSeek-R1)")
    parser.add_argument("--device", default="H200_SXM", help="device (default H200_SXM)")
    parser.add_argument("--num-devices", type=int, default=32, help="devices (default 32)")
    parser.add_argument("--runs", type=int, default=5, help="runs (default 5)")
    args = parser.parse_args()
    config = OptimizerConfig(
        model=args.model,
        devices=(args.device,),
        num_devices=args.num_devices,
        workload=Workload(4000, 1000),
        space=SearchSpace(dcp=(1, 2, 4, 8)),
    )
    runner = ParallelRunner(make_setting(config, args.device))
    runner.evaluate()  # traces
    rates = []
    for _ in range(args.runs):
        clear_memos()
        start = time.perf_counter()
        evaluation = runner.evaluate()
        seconds = time.perf_counter() - start
        points = sum(len(p.batches) for p in evaluation.points)
        rates.append(points / seconds)
        print(f"{len(evaluation.points)} layouts, {points:,} points in {seconds:.3f} s: {rates[-1]:,.0f} points/s")
    print(f"median {statistics.median(rates):,.0f} points/s")


if __name__ == "__main__":
    main()
