"""Collectives against sums done by hand, within a node and across."""

from __future__ import annotations

import numpy as np
import pytest

from tensor_cast.device.catalog import device_names, load_device
from tensor_cast.device.profile import DeviceProfile
from tensor_cast.errors import ConfigError
from tensor_cast.model_config import ParallelConfig
from tensor_cast.parallel import axis_ranks
from tensor_cast.performance_model.comm_analytic import (
    COLLECTIVE_KINDS,
    collective_seconds,
    collective_time,
    wire_bytes,
)

NODE, NET = 100e9, 10e9
ALPHA, PER_RANK, EFFICIENCY, HOP = 2e-6, 0.5e-6, 0.5, 5e-6


def device(*, mesh: int = 1) -> DeviceProfile:
    """Nodes of four devices with 100 GB/s inside and 10 GB/s between; every collective alike."""
    base = load_device("H100_SXM").model_dump()
    fit = {"alpha_s": ALPHA, "alpha_rank_s": PER_RANK, "efficiency": EFFICIENCY, "source": "test"}

    def link(value: float) -> dict[str, object]:
        return {"value": value, "source": "test"}

    base["tiers"] = [
        {"name": "node", "size": 4, "bandwidth": link(NODE), "latency_s": 0, "full_mesh_links": mesh},
        {"name": "net", "size": None, "bandwidth": link(NET), "latency_s": HOP},
    ]
    base["collectives"] = dict.fromkeys(COLLECTIVE_KINDS, fit)
    return DeviceProfile.model_validate(base)


@pytest.mark.parametrize(
    ("kind", "ranks", "expected"),
    [
        ("all_reduce", 4, 1.5e6),
        ("all_reduce", 2, 1e6),
        ("all_gather", 4, 3e6),
        ("reduce_scatter", 4, 0.75e6),
        ("all_to_all", 8, 0.875e6),
        ("p2p", 2, 1e6),
    ],
)
def test_bytes_one_rank_sends(kind: str, ranks: int, expected: float) -> None:
    assert wire_bytes(kind, 1e6, ranks) == expected


def test_unknown_collective() -> None:
    with pytest.raises(ConfigError, match="broadcast"):
        wire_bytes("broadcast", 1, 2)
    with pytest.raises(ConfigError, match="broadcast"):
        collective_seconds(device(), "broadcast", 1, (0, 1))


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_one_rank_costs_nothing(kind: str) -> None:
    assert collective_seconds(device(), kind, 1e9, (3,)) == 0


@pytest.mark.parametrize(("kind", "sent"), [("all_reduce", 1.5), ("all_gather", 3), ("reduce_scatter", 0.75)])
def test_in_one_node(kind: str, sent: float) -> None:
    expected = ALPHA + 3 * PER_RANK + sent * 1e6 / (NODE * EFFICIENCY)
    assert collective_seconds(device(), kind, 1e6, range(4)) == pytest.approx(expected)


def test_all_reduce_across_nodes_sends_a_quarter_between_them() -> None:
    inside = ALPHA + 3 * PER_RANK + 0.75e6 / (NODE * EFFICIENCY)  # reduce-scatter, and the same for the all-gather
    across = ALPHA + PER_RANK + HOP + (2 * 0.5 * 0.25e6) / (NET * EFFICIENCY)
    assert collective_seconds(device(), "all_reduce", 1e6, range(8)) == pytest.approx(2 * inside + across)


def test_reduce_scatter_across_nodes() -> None:
    inside = ALPHA + 3 * PER_RANK + 0.75e6 / (NODE * EFFICIENCY)
    across = ALPHA + PER_RANK + HOP + 0.5 * 0.25e6 / (NET * EFFICIENCY)
    assert collective_seconds(device(), "reduce_scatter", 1e6, range(8)) == pytest.approx(inside + across)


def test_all_gather_across_nodes_sends_its_input_once_between_them() -> None:
    across = ALPHA + PER_RANK + HOP + 1e6 / (NET * EFFICIENCY)
    inside = ALPHA + 3 * PER_RANK + 3 * 2e6 / (NODE * EFFICIENCY)
    assert collective_seconds(device(), "all_gather", 1e6, range(8)) == pytest.approx(across + inside)


def test_all_to_all_across_nodes() -> None:
    inside = ALPHA + 3 * PER_RANK + 0.75e6 / (NODE * EFFICIENCY)
    across = ALPHA + PER_RANK + HOP + 0.5e6 / (NET * EFFICIENCY)
    assert collective_seconds(device(), "all_to_all", 1e6, range(8)) == pytest.approx(inside + across)


def test_a_group_with_one_rank_a_node_never_uses_the_node_links() -> None:
    expected = ALPHA + PER_RANK + HOP + 1e6 / (NET * EFFICIENCY)
    assert collective_seconds(device(), "all_reduce", 1e6, (0, 4)) == pytest.approx(expected)


def test_pairs_of_a_full_mesh_have_one_link() -> None:
    mesh = device(mesh=3)
    assert collective_seconds(mesh, "p2p", 1e9, (0, 1)) == pytest.approx(
        ALPHA + PER_RANK + 1e9 / (NODE / 3 * EFFICIENCY)
    )
    assert collective_seconds(mesh, "all_gather", 1e9, range(4)) == pytest.approx(
        ALPHA + 3 * PER_RANK + 3e9 / (NODE * EFFICIENCY)
    )


def test_p2p_between_nodes_runs_at_the_network_rate() -> None:
    expected = ALPHA + PER_RANK + HOP + 1e9 / (NET * EFFICIENCY)
    assert collective_seconds(device(), "p2p", 1e9, (0, 4)) == pytest.approx(expected)


def test_small_messages_between_nodes_cost_latencies_not_a_bandwidth_ratio() -> None:
    """A 10 KB all-reduce: 16 us on one node became 158 us on two in a peer, ten times the ratio of starts."""
    h100 = load_device("H100_SXM")
    one = collective_seconds(h100, "all_reduce", 10_240, range(8))
    two = collective_seconds(h100, "all_reduce", 10_240, range(16))
    assert one < 16e-6
    assert one < two < 50e-6


def test_dcp_group_is_a_slice_of_the_tp_group_and_stays_in_its_node() -> None:
    parallel = ParallelConfig(tensor_parallel_size=16, decode_context_parallel_size=4)
    dcp, tp = axis_ranks(parallel, "dcp"), axis_ranks(parallel, "tp")
    assert set(dcp) < set(tp)
    h100 = load_device("H100_SXM")
    assert "over node:" in collective_time(h100, "all_to_all", 1e6, dcp).source
    assert "over node+network:" in collective_time(h100, "all_to_all", 1e6, tp).source


@pytest.mark.parametrize("name", device_names())
def test_grows_with_size_and_keeps_shape(name: str) -> None:
    sizes = np.logspace(2, 9, 20)
    for kind in COLLECTIVE_KINDS:
        ranks = (0, 1) if kind == "p2p" else range(8)
        seconds = collective_seconds(load_device(name), kind, sizes, ranks)
        assert seconds.shape == sizes.shape
        assert (np.diff(seconds) > 0).all()
