"""``msmodeling capacity --calibrate-from``: what is shown of a measured start, and how it is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]

LLAMA = ("capacity", "meta-llama/Llama-3.1-8B", "--device", "A100_80G_SXM")

#: As published for one A100 (vLLM 0.33): 15.26 + 1.44 + 56.21 = 72.91 = 0.92 * 79.25.
LOG = """\
(EngineCore pid=326) INFO 10-06 17:00:33 [kv_cache_utils.py:2464] GPU KV cache size: 460,496 tokens, Maximum \
concurrency for 131,072 tokens per request: 3.51x
(EngineCore pid=326) INFO 10-06 17:00:41 [gpu_worker.py:955] Free memory on device (78.84/79.25 GiB) on startup. \
Desired GPU memory utilization is (0.92, 72.91 GiB). Actual usage is 15.26 GiB for consumed memory (weights + \
non-torch), 1.44 GiB for peak activation, and 0.23 GiB for CUDAGraph memory. Current kv cache \
memory in use is 56.21 GiB.
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "start.log"
    file.write_text(LOG)
    return file


def test_the_measured_cache_is_shown_beside_ours(run: Run, log: Path) -> None:
    shown = run(*LLAMA, "--calibrate-from", log)
    assert shown.code == 0, shown.err
    assert "Measured (start.log, vllm, one rank, 32)" in shown.out
    # 56.21 GiB hold 28,779 blocks of 16 tokens of 131,072 B.
    assert "460,496 tokens printed, 460,464 predicted from its KV memory (-0.01%)" in shown.out
    document = run(*LLAMA, "--calibrate-from", log, "--format", "json").json()
    measured = document["measured_run"]
    assert (measured["source"], measured["engine"], measured["layout"]) == ("start.log", "vllm", "one rank")
    assert measured["kv_cache"]["tokens"] == {
        "measured": 460_496,
        "predicted": 460_464,
        "difference": pytest.approx(460_464 / 460_496 - 1),
    }


def test_the_layout_may_be_given(run: Run, log: Path) -> None:
    log.write_text(LOG.replace("(EngineCore pid=326) ", ""))
    refused = run(*LLAMA, "--calibrate-from", log)
    assert refused.code == 2
    assert "--measured-tp-size" in refused.err
    assert run(*LLAMA, "--calibrate-from", log, "--measured-tp-size", 1).code == 0
    two = run(*LLAMA, "--calibrate-from", log, "--measured-tp-size", 2)
    # Half of the weights leave too much.
    assert two.code == 2
    assert "cannot be meta-llama/Llama-3.1-8B" in two.err


def test_options_of_a_start_need_one(run: Run) -> None:
    refused = run(*LLAMA, "--measured-tp-size", 2)
    assert refused.code == 2
    assert "--calibrate-from FILE" in refused.err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("15.26 GiB", "1.5.26 GiB", "line 2: '1.5.26' is no number"),
        ("15.26 GiB", ".. GiB", "line 2: '..' is no number"),
        ("/79.25", "/139.80", "does not add up"),
        ("15.26 GiB", "10.26 GiB", "does not add up"),
    ],
)
def test_refusals_are_one_line(run: Run, log: Path, old: str, new: str, message: str) -> None:
    log.write_text(LOG.replace(old, new))
    refused = run(*LLAMA, "--calibrate-from", log)
    assert refused.code == 2
    assert message in refused.err
    assert "start.log" in refused.err
    assert refused.err.count("\n") == 1


@pytest.mark.parametrize("memory", ["inf,1", "1e400,1", "nan,1"])
def test_kv_memory_is_finite(run: Run, memory: str) -> None:
    refused = run(*LLAMA, "--pp-size", 2, f"--kv-memory-gib={memory}")
    assert refused.code == 2
    assert "kv_memory_gib.0: input should be a finite number" in refused.err


@pytest.mark.parametrize("size", [("--tp-size", 2), ("--pp-size", 2)])
def test_a_rank_alone_has_no_communicators_so_theirs_are_added(run: Run, log: Path, size: tuple[str, int]) -> None:
    alone = run(*LLAMA, "--calibrate-from", log, "--format", "json").json()
    several = run(*LLAMA, *size, "--calibrate-from", log, "--format", "json").json()
    # configs/engines/vllm.yaml: collective_gib 1.9, from start-up logs of 2 and 4 devices.
    for stage in several["stages"]:
        assert stage["non_torch_gib"] == pytest.approx(alone["stages"][0]["non_torch_gib"] + 1.9, abs=1e-6)
    assert several["measured_run"]["communication_gib"] == pytest.approx(1.9)
    assert alone["measured_run"]["communication_gib"] == 0
    assert "1.90 GiB are added to its non-torch memory" in run(*LLAMA, *size, "--calibrate-from", log).out
    assert "communicators" not in run(*LLAMA, "--calibrate-from", log).out


@pytest.mark.parametrize(
    ("consumed", "kv", "taken", "left"),
    [
        # Half of the weights is 7.479 GiB, the rotary table 0.031: 2.20 and 1.00 GiB are outside the allocator. A rank
        # alone has 0.25 of context and libraries (configs/engines/vllm.yaml), which is what stays at least.
        (9.71, 61.76, "1.90", 0.33),
        (8.51, 62.96, "0.75", 0.28),
        (7.71, 63.76, "", 0.23),
    ],
)
def test_from_several_ranks_to_one_theirs_are_taken_off(
    run: Run, tmp_path: Path, consumed: float, kv: float, taken: str, left: float
) -> None:
    file = tmp_path / "two.yaml"
    file.write_text(
        "tp_size: 2\nmax_model_len: 131072\ngpu_memory_utilization: 0.92\ntotal_gib: 79.25\nstages:\n"
        f"  - {{consumed_gib: {consumed}, activation_gib: 1.44, graph_gib: 0.23, kv_gib: {kv}}}\n"
    )
    shown = run(*LLAMA, "--calibrate-from", file)
    assert (f"{taken} GiB are taken off" in shown.out) == bool(taken)
    assert ("communicators" in shown.out) == bool(taken)
    stage = run(*LLAMA, "--calibrate-from", file, "--format", "json").json()["stages"][0]
    assert stage["non_torch_gib"] == pytest.approx(left, abs=0.005)
    assert "communicators" not in run(*LLAMA, "--tp-size", 2, "--calibrate-from", file).out


def test_the_log_of_another_model_is_among_the_causes(run: Run, log: Path) -> None:
    shown = run("capacity", "Qwen/Qwen3-8B", "--device", "A100_80G_SXM", "--calibrate-from", log)
    # Blocks of 36 layers are 9/8 as large as those of 32: 25,581 of 16 tokens.
    assert "460,496 tokens printed, 409,296 predicted" in shown.out
    assert "another MODEL, --kv-cache-dtype" in shown.out


def test_units_are_read(run: Run, log: Path) -> None:
    log.write_text(LOG.replace("56.21 GiB", "57559.04 MiB"))
    assert "460,464 predicted" in run(*LLAMA, "--calibrate-from", log).out
    # A smaller unit is no other spelling of GiB: the account does not add up.
    log.write_text(LOG.replace("56.21 GiB", "56.21 MiB"))
    assert "the KV memory (0.05)" in run(*LLAMA, "--calibrate-from", log).err
    log.write_text(LOG.replace("56.21 GiB", "56.21 XiB"))
    refused = run(*LLAMA, "--calibrate-from", log)
    assert refused.code == 2
    assert "line 2: unit 'XiB' is unknown; allowed are KiB, MiB, GiB, GB, TiB" in refused.err
