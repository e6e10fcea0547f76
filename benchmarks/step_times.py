"""Predicted against measured serving: TPOT, TTFT and whole requests of each row of a file of measurements.

    python -m benchmarks.step_times CASES.jsonl [--configs FOLDER] [--by engine device weight_quant] [--rows]

A row is a JSON object on a line of its own: ``config`` (model id), ``device``, ``engine``, ``tp``, ``pp``, ``dp``,
``ep``, ``dcp``, ``mtp``, ``weight_quant``, ``kv_dtype``, ``input_len``, ``output_len``, ``batch_or_concurrency`` and
``measured`` with ``tpot_ms`` and, if known, ``ttft_ms``. ``--configs`` holds ``<org>--<name>/config.json`` of models
that are not embedded. Engines without a profile are priced as vLLM. Errors are predicted / measured - 1.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from serving_cast.config import OptimizerConfig, SearchSpace, Workload
from serving_cast.parallel_runner import ParallelRunner
from serving_cast.service.layout_costs import TracedCostsFactory
from serving_cast.setting import make_setting
from tensor_cast.core.trace_library import TraceLibrary
from tensor_cast.engine.catalog import engine_names
from tensor_cast.errors import MsModelingError
from tensor_cast.model_catalog import load_model_config, model_names

#: What measurements call a scheme -> ours; None leaves it to the model's own config.
SCHEMES = {"bf16": "DISABLED", "fp8": "FP8", "fp8_block": "FP8_BLOCK", "mxfp4": None, "nvfp4": "NVFP4"}


@dataclass(frozen=True)
class Result:
    """A measured row and what is predicted for it, in milliseconds; NaN where nothing was measured."""

    row: dict[str, Any]
    tpot_ms: float
    ttft_ms: float

    @property
    def tpot_error(self) -> float:
        """Relative error of TPOT."""
        return self.tpot_ms / float(self.row["measured"].get("tpot_ms") or np.nan) - 1.0

    @property
    def request_error(self) -> float:
        """Relative error of a whole request at this concurrency, hence of the throughput.

        A measured request takes TTFT + (OSL - 1) TPOT. The mean step of a prediction carries everybody's prompts, so
        that a request takes OSL * TPOT.
        """
        measured, length = self.row["measured"], self.row["output_len"]
        ttft = float(measured.get("ttft_ms") or np.nan)
        took = ttft + (length - 1) * float(measured.get("tpot_ms") or np.nan)
        return float(self.tpot_ms * length / took - 1.0)

    @property
    def ttft_error(self) -> float:
        """Relative error of TTFT."""
        return self.ttft_ms / float(self.row["measured"].get("ttft_ms") or np.nan) - 1.0


@cache
def library(model: str) -> TraceLibrary:
    """The traces of a model, shared by all its rows."""
    return TraceLibrary(load_model_config(model))


def predict(row: dict[str, Any], configs: Path | None) -> Result:
    """Price the row's layout at its concurrency.

    Raises:
        MsModelingError: what the row asks for cannot be priced.
    """
    model, tp, dp = row["config"], row["tp"], row.get("dp") or 1
    if model not in model_names() and configs is not None:
        folder = configs / model.replace("/", "--")
        model = str(folder) if folder.exists() else model
    moe = load_model_config(model).is_moe
    batch = max(1, round(row["batch_or_concurrency"] / dp))
    kv_dtype = row.get("kv_dtype")
    config = OptimizerConfig(
        model=model,
        devices=(row["device"],),
        num_devices=tp * (row.get("pp") or 1) * dp,
        workload=Workload(row["input_len"], row["output_len"], num_mtp_tokens=row.get("mtp") or 0),
        space=SearchSpace(
            tp=(tp,),
            pp=(row.get("pp") or 1,),
            dp=(dp,),
            ep=((row.get("ep") or 1) if moe else 1,),
            dcp=(row.get("dcp") or 1,),
            batch_range=(batch, batch),
        ),
        engine=row["engine"] if row["engine"] in engine_names() else None,
        quantize_linear_action=SCHEMES.get(row["weight_quant"]),
        quantize_attention_action={"fp8": "FP8"}.get(kv_dtype) if kv_dtype else None,
    )
    setting = make_setting(config, row["device"])
    found = ParallelRunner(setting, costs=TracedCostsFactory(setting, library=library(model))).evaluate()
    for refused in found.rejections:
        raise MsModelingError(f"[{refused.rule}] need {refused.need}, have {refused.have}")
    (points,) = found.points
    index = int(np.searchsorted(points.batches, batch))
    state = points.state
    if index >= len(points.batches) or not state.within_budget[index]:
        raise MsModelingError("beyond the token budget of a step")
    assert state.tpot is not None
    assert state.ttft is not None
    return Result(row, 1e3 * float(state.tpot[index]), 1e3 * float(state.ttft[index]))


def summary(name: str, results: Iterable[Result]) -> str:
    """One line: rows; median error, and median and 90th percentile of its size, of TPOT, TTFT and a whole request."""
    found = list(results)
    cells = [f"{name:<44}{len(found):>5}"]
    for field in ("tpot_error", "ttft_error", "request_error"):
        errors = [getattr(r, field) for r in found]
        known = np.array([e for e in errors if np.isfinite(e)])
        if known.size:
            size = np.abs(known)
            cells.append(f"{np.median(known):>+9.1%}{np.median(size):>8.1%}{np.percentile(size, 90):>8.1%}")
    return "".join(cells)


def main() -> None:
    """Price every row, and print errors by group."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path, help="file of measurements, one JSON object a line")
    parser.add_argument("--configs", type=Path, help="folder of model configs that are not embedded")
    parser.add_argument("--by", nargs="*", default=["engine", "config"], help="fields to group by")
    parser.add_argument("--rows", action="store_true", help="print every row")
    options = parser.parse_args()
    results: list[Result] = []
    failed: Counter[str] = Counter()
    for line in options.cases.read_text().splitlines():
        row = json.loads(line)
        try:
            results.append(predict(row, options.configs))
        except MsModelingError as error:
            failed[f"{row['config']} on {row['device']}: {error}"[:160]] += 1
    if options.rows:
        for r in sorted(results, key=lambda r: r.tpot_error):
            what = " ".join(str(r.row.get(k)) for k in ("config", "device", "engine", "weight_quant", "tp", "ep"))
            shape = f"{r.row['input_len']}/{r.row['output_len']} c{r.row['batch_or_concurrency']}"
            measured = r.row["measured"]
            print(
                f"{what:<64}{shape:<18}TPOT {r.tpot_ms:8.2f} of {measured.get('tpot_ms') or 0:8.2f} "
                f"{r.tpot_error:+7.1%}   TTFT {r.ttft_ms:8.0f} of {measured.get('ttft_ms') or 0:8.0f} "
                f"{r.ttft_error:+7.1%}"
            )
    print(f"{'':<44}{'rows':>5}  TPOT: median, of sizes, 90th   TTFT: the same           whole request: the same")
    groups: dict[str, list[Result]] = defaultdict(list)
    for r in results:
        groups[" ".join(str(r.row.get(field)) for field in options.by)].append(r)
    for name in sorted(groups):
        print(summary(name, groups[name]))
    print(summary("all", results))
    for reason, count in failed.most_common():
        print(f"not priced, {count} rows: {reason}")


if __name__ == "__main__":
    main()
