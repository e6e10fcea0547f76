"""The torch-free floors import no torch: proven by importing them, not by reading them."""

import subprocess
import sys

import pytest

MODULES = [
    "cli.main",
    "cli.inference.capacity",
    "cli.inference.throughput_optimizer",
    "cli.inference.text_generate",
    "cli.inference.trace",
    "serving_cast.parallel_runner",
    "serving_cast.service.report",
    "serving_cast.workload",
    "serving_cast.service.search",
    "serving_cast.service.optimizer_summary",
    "tensor_cast",
    "tensor_cast.core.calibration",
    "tensor_cast.core.capacity",
    "tensor_cast.core.model_runner",
    "tensor_cast.core.trace_view",
    "tensor_cast.core.trace_library",
    "tensor_cast.performance_model.estimate",
    "tensor_cast.performance_model.memory",
    "tensor_cast.ir.fuse",
    "tensor_cast.ir.quantize",
    "tensor_cast.engine.kv_cache",
    "tensor_cast.pipeline_partition",
    "tensor_cast.engine.kv_groups",
    "tensor_cast.device.topology",
    "tensor_cast.model_catalog",
]


@pytest.mark.parametrize("module", MODULES)
def test_importing_the_module_brings_no_torch(module):
    run = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", f"import {module}"], capture_output=True, text=True, check=True
    )
    imported = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines() if line.startswith("import time:")}
    assert module in imported
    assert not {name for name in imported if name.split(".")[0] in ("torch", "transformers", "sympy")}
