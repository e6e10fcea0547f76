"""Our memory sum against start-up logs of engines: weights, activation peak, non-torch memory, KV memory and tokens.

    python -m benchmarks.memory_cases CASES.jsonl [--configs DIR] [--verbose]

Each line of the file is a JSON object: ``model`` (hub id), ``engine``, ``engine_version``, ``gpu``, ``gpu_mem_gib``,
``tp``, ``pp``, ``dp``, ``ep``, ``max_model_len``, ``gpu_memory_utilization``, ``block_size``,
``max_num_batched_tokens``, ``kv_cache_dtype``, ``quantization`` and ``observed`` with what the log printed in GiB
(``weights_gib``, ``activation_gib``, ``non_torch_gib``, ``kv_available_gib``) and ``kv_tokens``. A field may be null
or missing; what depends on it is then not compared. Configs that are not embedded are looked for in DIR as
``org--name/config.json``.

KV tokens are computed from the KV memory that the log names, which has two decimals: the error is 0 where some memory
that rounds to it gives the tokens of the log.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensor_cast.core.capacity import CapacityPlanner
from tensor_cast.core.capacity_config import CapacityConfig
from tensor_cast.core.capacity_plan import StageMemory
from tensor_cast.device.catalog import load_device
from tensor_cast.engine.rope import rope_cache_bytes
from tensor_cast.errors import MsModelingError, UnknownNameError
from tensor_cast.units import GIB

#: Words in the name of a GPU -> device; the first that is found counts.
DEVICES = {
    "H100": "H100_SXM",
    "H200": "H200_SXM",
    "B200": "B200_SXM",
    "A100": "A100_80G_SXM",
    "A10G": "A10",
    "5090": "RTX_5090",
    "4090": "RTX_4090",
    "MI35": "MI355X",
    "Ascend": "ATLAS_800_A2_376T_64G",
}
#: What stands in where no device is named: weights do not depend on it.
ANY_DEVICE = "H100_SXM"
#: A log's name of a method -> scheme, where the config itself names none.
SCHEMES = {"fp8": "FP8", "mxfp4": "MXFP4", "nvfp4": "NVFP4", "awq": "W4A16", "ascend w8a8": "W8A8_DYNAMIC"}
#: From this release of vLLM on graphs are estimated and subtracted before the cache is sized.
GRAPHS_SUBTRACTED_FROM = (0, 21)
#: Half a unit in the last place that logs print, in GiB.
ROUNDING_GIB = 0.005

QUANTITIES = ("weights", "activation", "non-torch", "KV memory", "KV tokens", "concurrency")


@dataclass(frozen=True)
class Comparison:
    """One quantity of one row: what the log says, and what we say; GiB, tokens or requests."""

    row: str
    quantity: str
    measured: float
    ours: float
    error: float


def main() -> int:
    """Compare every row, list what cannot be run, and print the errors by quantity."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path, help="file of start-up logs, one JSON object a line")
    parser.add_argument("--configs", type=Path, help="folder of configs that are not embedded")
    parser.add_argument("--verbose", action="store_true", help="every comparison, not the summary alone")
    args = parser.parse_args()
    found: list[Comparison] = []
    for row in read_rows(args.cases):
        label = f"{row['id']} {row.get('model') or 'no model'}"
        try:
            here = list(compare(row, args.configs))
        except UnknownNameError:
            print(f"not run: {label}: no config of that name; --configs gives others than the embedded ones")
            continue
        except (MsModelingError, UnusableRowError, RuntimeError) as error:
            print(f"not run: {label}: {error}")
            continue
        if not here:
            print(f"not run: {label}: the log has none of the numbers that are compared")
        found += here
        if args.verbose:
            for c in here:
                print(f"{label:<66} {c.quantity:<11} {c.measured:>12,.2f} {c.ours:>12,.2f} {c.error:>+8.2%}")
    print(f"{'quantity':<12}{'rows':>5}{'median |error|':>16}{'worst':>9}  of")
    for quantity in QUANTITIES:
        errors = [c for c in found if c.quantity == quantity]
        if errors:
            worst = max(errors, key=lambda c: abs(c.error))
            median = statistics.median(abs(c.error) for c in errors)
            print(f"{quantity:<12}{len(errors):>5}{median:>16.2%}{worst.error:>+9.2%}  {worst.row}")
    return 0


#: Makes a comparison of (quantity, measured, ours), or none where one of the two is missing.
_Make = Callable[[str, float | None, float | None], Iterator[Comparison]]


class UnusableRowError(Exception):
    """A row that says too little to be run."""


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of the file. Exits with the reason where it cannot be read."""
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, json.JSONDecodeError) as error:
        raise SystemExit(f"error: {path}: {error}; need one JSON object a line") from None


def compare(row: Mapping[str, Any], configs: Path | None) -> Iterator[Comparison]:
    """Every quantity that the log and our plan both have.

    Raises:
        UnusableRowError: the row names no model or no number of ranks.
        MsModelingError: the model or the layout cannot be planned.
    """
    observed = row["observed"]
    if not row.get("model"):
        raise UnusableRowError("the log names no model")
    if not row.get("tp"):
        raise UnusableRowError("the log does not say on how many ranks it ran")
    known = _device(row)
    if row.get("gpu_mem_gib") and known is None:
        known = _by_memory(float(row["gpu_mem_gib"]))
    planner = CapacityPlanner(_config(row, configs, known or ANY_DEVICE))
    plan = planner.plan()

    def make(quantity: str, measured: float | None, ours: float | None) -> Iterator[Comparison]:
        if measured and ours is not None:
            yield Comparison(row["id"], quantity, measured, ours, ours / measured - 1)

    # Of several stages a log that names one value means the fullest rank.
    stage = max(plan.stages, key=lambda s: s.weights or 0)
    if stage.weights is not None and stage.activation is not None:
        memory = planner.memory
        # Logs count rotary tables with the weights, and those before 0.28 the kernels' buffers with the activations.
        tables, buffers = rope_cache_bytes(planner.model), memory.workspaces.persistent
        yield from make("weights", observed.get("weights_gib"), (stage.weights + tables) / GIB)
        if known and row["engine"] != "sglang":
            outside = planner.start_up.outside_bytes(planner.parallel)
            yield from make("activation", observed.get("activation_gib"), (stage.activation + buffers) / GIB)
            yield from make("non-torch", observed.get("non_torch_gib"), outside / GIB)
            if row.get("gpu_memory_utilization") and row.get("max_model_len"):
                yield from make("KV memory", observed.get("kv_available_gib"), _kv_memory(row, stage, planner))
    yield from _tokens(row, configs, known or ANY_DEVICE, make)


def _kv_memory(row: Mapping[str, Any], stage: StageMemory, planner: CapacityPlanner) -> float:
    """GiB for the cache on the device of the row, with graphs as its release treats them."""
    kv: float = stage.kv
    if row.get("gpu_mem_gib"):
        total = float(row["gpu_mem_gib"]) * GIB
        kv += (total - planner.device.usable_memory_bytes.value) * planner.start_up.utilization
    release = _release(row)
    if release is not None and release < GRAPHS_SUBTRACTED_FROM:
        kv += stage.graph or 0
    return kv / GIB


def _tokens(row: Mapping[str, Any], configs: Path | None, device: str, make: _Make) -> Iterator[Comparison]:
    """KV tokens and concurrency, given the memory of the log."""
    observed = row["observed"]
    memory = observed.get("kv_available_gib")
    if not memory:
        return
    plans = []
    for gib in (memory, max(0.0, memory - ROUNDING_GIB), memory + ROUNDING_GIB):
        config = _config(row, configs, device).model_copy(update={"kv_memory_gib": (gib,)})
        plans.append(CapacityPlanner(config).plan().capacity)
    for quantity, measured, ours in (
        ("KV tokens", observed.get("kv_tokens"), [float(p.kv_tokens) for p in plans]),
        ("concurrency", observed.get("max_concurrency"), [p.max_concurrency for p in plans]),
    ):
        if measured and (quantity == "KV tokens" or row.get("max_model_len")):
            slack = ROUNDING_GIB if quantity == "concurrency" else 0.0
            inside = ours[1] - slack <= measured <= ours[2] + slack
            yield from make(quantity, measured, measured if inside else ours[0])


def _config(row: Mapping[str, Any], configs: Path | None, device: str) -> CapacityConfig:
    """The question that the row answers."""
    name = re.sub(r" (class )?\(inferred\)$", "", str(row["model"]))
    folder = None if configs is None else configs / name.replace("/", "--")
    model = str(folder) if folder is not None and (folder / "config.json").is_file() else name
    tp, dp = int(row["tp"]), int(row.get("dp") or 1)
    if row["engine"] == "sglang":  # its tp counts all ranks of a replica, those of data-parallel attention too
        tp //= dp
    experts = row.get("ep")
    ep = tp * dp if experts is True else int(experts or 1)
    values: dict[str, Any] = {
        "model": model,
        "device": device,
        "engine": "vllm-ascend" if row["engine"] == "vllm-ascend" else None,
        "tp_size": tp,
        "pp_size": row.get("pp") or 1,
        "dp_size": dp,
        "ep_size": ep,
        "dcp_size": row.get("dcp") or 1,
        "max_model_len": row.get("max_model_len"),
        "gpu_memory_utilization": row.get("gpu_memory_utilization"),
        "block_size": row.get("block_size"),
        "max_num_batched_tokens": row.get("max_num_batched_tokens"),
    }
    dtype = str(row.get("kv_cache_dtype") or "auto").split(" ")[0]
    values["kv_cache_dtype"] = {"bf16": "bfloat16"}.get(dtype, dtype)
    scheme = SCHEMES.get(str(row.get("quantization")).casefold())
    if scheme and not _quantised(model):
        values["quantize_linear_action"] = scheme
    return CapacityConfig.create(**values)


def _quantised(model: str) -> bool:
    from tensor_cast.model_catalog import load_model_config

    return load_model_config(model).quantization is not None


def _device(row: Mapping[str, Any]) -> str | None:
    text = str(row.get("gpu") or "")
    if " + " in text:  # devices of several kinds
        return None
    return next((device for word, device in DEVICES.items() if word in text), None)


def _by_memory(gib: float) -> str | None:
    """A device of about that memory, for the engine's defaults."""
    near = [name for name in dict.fromkeys(DEVICES.values()) if abs(_usable(name) - gib) < 2.0]
    return near[0] if near else None


def _usable(name: str) -> float:
    return float(load_device(name).usable_memory_bytes.value / GIB)


def _release(row: Mapping[str, Any]) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", str(row.get("engine_version") or ""))
    return (int(match[1]), int(match[2])) if match else None


if __name__ == "__main__":
    sys.exit(main())
