"""How long the main jobs take and how much memory they need, cold (empty trace cache) and warm.

    python -m benchmarks.main_job [--runs 5]

Each run is a process of its own; time is wall time, memory the peak resident size of the largest process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

LIMITS = ["--input-length", "4000", "--output-length", "1000", "--ttft-limit", "5000", "--tpot-limit", "50"]
OPTIMIZER, PROGRAM = "cli.inference.throughput_optimizer", "cli.main"
#: Name -> (module and arguments, (seconds, MiB) at most with an empty cache, the same with a warm one).
JOBS: dict[str, tuple[list[str], tuple[float, float | None], tuple[float, float | None]]] = {
    "DeepSeek-R1 on 32 H200": (
        [
            *(OPTIMIZER, "deepseek-ai/DeepSeek-R1", "--device", "H200_SXM", "--num-devices", "32"),
            *(*LIMITS, "--dcp-sizes", "1,2,4,8"),
        ],
        (12.0, 1000.0),
        (2.0, 250.0),
    ),
    "Qwen3-32B on 8 H200": (
        [OPTIMIZER, "Qwen/Qwen3-32B", "--device", "H200_SXM", "--num-devices", "8", *LIMITS],
        (7.0, None),
        (1.0, None),
    ),
    # Each of 77 partitions is refused or sized; the command lists them all.
    "GLM-5.3, all PP2 splits": (
        [
            *(PROGRAM, "capacity", "zai-org/GLM-5.3-W4A16", "--device", "A800_80G_SXM", "--tp-size", "4"),
            *("--pp-size", "2", "--pp-layer-partition", "all"),
        ],
        (12.0, None),
        (2.0, None),
    ),
}


@dataclass(frozen=True)
class Run:
    """One finished process: wall seconds and peak MiB."""

    seconds: float
    peak_mib: float


def run_once(arguments: list[str], cache_dir: str) -> Run:
    """Run a module with its arguments once, its trace cache in ``cache_dir``."""
    command = [sys.executable, "-m", *arguments]
    start = time.perf_counter()
    process = subprocess.Popen(
        command,
        env={**os.environ, "MSMODELING_CACHE_DIR": cache_dir},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if os.waitstatus_to_exitcode(status) != 0:
        message = process.stderr.read().decode() if process.stderr else ""
        raise SystemExit(f"{' '.join(command)} failed: {message}")
    return Run(seconds, usage.ru_maxrss / 1024)


def main() -> None:
    """Print a table of medians against their budgets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="runs of each kind (default 5)")
    runs = parser.parse_args().runs
    print(f"{'job':<26}{'cache':<7}{'median s':>9}{'min':>7}{'max':>7}{'budget':>8}{'peak MiB':>10}{'budget':>8}")
    for name, (arguments, cold_budget, warm_budget) in JOBS.items():
        cold = []
        for _ in range(runs):
            with tempfile.TemporaryDirectory() as cache:
                cold.append(run_once(arguments, cache))
        with tempfile.TemporaryDirectory() as cache:
            run_once(arguments, cache)
            warm = [run_once(arguments, cache) for _ in range(runs)]
        for kind, results, (seconds, mib) in (("empty", cold, cold_budget), ("warm", warm, warm_budget)):
            times = [r.seconds for r in results]
            peak = max(r.peak_mib for r in results)
            print(
                f"{name:<26}{kind:<7}{statistics.median(times):>9.2f}{min(times):>7.2f}{max(times):>7.2f}"
                f"{seconds:>8.1f}{peak:>10.0f}{mib or '':>8}"
            )


if __name__ == "__main__":
    main()
