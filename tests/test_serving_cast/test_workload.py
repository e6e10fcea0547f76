"""The example workload gives its source's table to the printed digits, with the machinery of real models."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving_cast.workload import LayoutSizes, load_workload, workload_names
from tensor_cast.errors import ConfigError, UnknownNameError

#: (tp, pp, devices, concurrency, TPOT ms, tok/s, tok/s per device), as printed in source 004, section 7.
TABLE = """
 8 1  8  1  6.93  144  18
 4 2  8  1 12.26   82  10
 2 4  8  1 22.91   44   5
16 1 16  1  7.58  132   8
 8 2 16  1  6.96  144   9
 8 1  8 64 10.73 5967 746
 4 2  8 64 15.63 4094 512
 2 4  8 64 26.01 2461 308
16 1 16 64 16.93 3780 236
 8 2 16 64  8.85 7233 452
"""


def printed(text: str) -> list[tuple[str, ...]]:
    return [tuple(line.split()) for line in text.strip().splitlines()]


def test_the_table_to_the_printed_digits() -> None:
    rows = [
        (
            f"{row.sizes.tp}",
            f"{row.sizes.pp}",
            f"{row.devices}",
            f"{row.concurrency}",
            f"{row.tpot_ms:.2f}",
            f"{row.tokens_per_second:.0f}",
            f"{row.tokens_per_second_per_device:.0f}",
        )
        for row in load_workload("llama_70b_pp_example").rows()
    ]
    assert rows == printed(TABLE)


def test_replicas_serve_more_than_stages_on_the_same_devices() -> None:
    """Section 7's last point: two TP8 replicas against TP8 PP2, 64 requests on sixteen devices."""
    workload = load_workload("llama_70b_pp_example")
    replicas = workload.row(LayoutSizes(tp=8), 64, replicas=2)
    stages = workload.row(LayoutSizes(tp=8, pp=2), 64)
    assert replicas.devices == stages.devices == 16
    # 32 requests a replica by hand: weights 141.2e9/8/3.35e12, KV 32*4096*327680/8/3.35e12, 160 reduces of 512 KiB.
    hand = 141.2e9 / 8 / 3.35e12 + 32 * 4096 * 327680 / 8 / 3.35e12 + 160 * (10e-6 + 1.75 * 32 * 8192 * 2 / 450e9)
    assert replicas.tpot_ms == pytest.approx(hand * 1e3)
    # Both read the same weights per device and token, so what is left to tell them apart is a transfer per step.
    assert stages.tpot_ms - replicas.tpot_ms == pytest.approx((30e-6 + 2 * 32 * 8192 * 2 / 50e9) * 1e3)
    # At 128 requests, 64 a replica, as the source compares with (746 a device against 452):
    assert workload.row(LayoutSizes(tp=8), 128, replicas=2).tokens_per_second_per_device == pytest.approx(746, abs=0.5)


def test_names_and_errors(tmp_path: Path) -> None:
    assert "llama_70b_pp_example" in workload_names()
    with pytest.raises(UnknownNameError, match="llama_70b_pp_example"):
        load_workload("llama_70b")
    broken = tmp_path / "mine.yaml"
    broken.write_text("name: mine\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="missing"):
        load_workload(str(broken))
