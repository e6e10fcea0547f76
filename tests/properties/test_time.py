"""Time obeys physics: no op beats the device's rates, and no step gets faster by doing more."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from embedded import ALL, DENSE, Traces, cases, examples, layouts, sizes
from hypothesis import given
from hypothesis import strategies as st
from products import product_flops

from tensor_cast.device.catalog import device_names, load_device
from tensor_cast.device.profile import DeviceProfile
from tensor_cast.engine.catalog import load_engine
from tensor_cast.errors import ConfigError
from tensor_cast.ir.program import Layout
from tensor_cast.ir.record import OpRecord, Phase
from tensor_cast.model_catalog import load_model_config
from tensor_cast.model_config import ParallelConfig
from tensor_cast.parallel import axis_ranks
from tensor_cast.performance_model.analytic import kernel_seconds, kernel_time
from tensor_cast.performance_model.base import COSTS, DimTable
from tensor_cast.performance_model.comm_analytic import collective_time, wire_bytes
from tensor_cast.performance_model.estimate import StepEstimator
from tensor_cast.performance_model.memory import weight_bytes
from tensor_cast.quant import QuantConfig

#: Data-centre and desktop parts, GPUs and NPUs, with full meshes and with switches.
DEVICES = (
    "A100_80G_SXM",
    "H100_SXM",
    "H20",
    "B200_SXM",
    "ATLAS_800_A2_376T_64G",
    "ATLAS_800_A3_752T_128G_DIE",
    "MI300X",
)
ACTIONS = (None, "DISABLED", "W8A8_DYNAMIC", "FP8", "W4A16")


def estimator(name: str, layout: Layout, device: str, traces: Traces, action: str | None = None) -> StepEstimator:
    quant = QuantConfig.resolve(load_model_config(name), action, None)
    return StepEstimator(
        traces.of(name, layout),
        device=load_device(device),
        engine=load_engine("vllm"),
        parallel=layout.parallel,
        quant=quant,
    )


def seconds(est: StepEstimator, env: Mapping[str, Any]) -> Any:
    return sum(est.scope_seconds(env).values())


def sized_ops(est: StepEstimator, env: Mapping[str, int]) -> Iterator[OpRecord]:
    for segment in est.segments:
        table = DimTable(env if segment.query_len is None else {**env, "Q": segment.query_len})
        yield from (table.op(op) for op in segment.part.ops)


def fastest_link(device: DeviceProfile) -> float:
    return max(tier.bandwidth.value for tier in device.tiers)


@given(data=st.data(), case=cases(free=True), device=st.sampled_from(device_names()), action=st.sampled_from(ACTIONS))
@examples(25)
def test_no_op_beats_the_device(
    data: st.DataObject, case: tuple[str, Layout], device: str, action: str | None, traces: Traces
) -> None:
    """Every op on every device and dtype: FLOPs over the peak rate, bytes over the memory, wire bytes over the link."""
    name, layout = case
    env = data.draw(sizes(layout.phase))
    est, profile = estimator(name, layout, device, traces, action), load_device(device)
    try:
        seconds(est, env)
    except ConfigError:
        return  # the device cannot compute in that dtype, and says so
    for op in sized_ops(est, env):
        cost = COSTS.get(op.name)(op)
        if cost.collective is not None:
            wire = cost.collective
            time = collective_time(profile, wire.kind, wire.nbytes, axis_ranks(layout.parallel, wire.axis))
            # In a hierarchy each level moves its share; together no less than a flat ring's share over the best link.
            assert time.seconds > 0
            least = wire_bytes(wire.kind, wire.nbytes, 2 if wire.kind != "all_gather" else wire.group_size)
            assert time.seconds >= least / sum(t.bandwidth.value for t in profile.tiers), (op.name, device)
            continue
        time = kernel_time(cost, profile)
        assert np.isfinite(time.seconds)
        assert time.seconds >= 0
        if cost.free:
            continue
        if cost.compute_dtype:
            peak = profile.peak_flops[profile.emulates.get(cost.compute_dtype, cost.compute_dtype)].value
            assert time.seconds >= cost.flops / peak, (op.name, op.module, device)
        assert time.seconds >= cost.nbytes / profile.memory_bandwidth.value, (op.name, op.module, device)
        written = sum(float(np.prod(t.shape)) for t in op.outputs)
        assert cost.bytes_written >= 0
        assert cost.bytes_read >= 0
        assert written >= 0


@given(data=st.data(), case=cases(DENSE), device=st.sampled_from(DEVICES))
@examples(25)
def test_no_step_beats_weights_and_products(
    data: st.DataObject, case: tuple[str, Layout], device: str, traces: Traces
) -> None:
    """A dense step reads every weight but the embedding once, and multiplies what the model multiplies."""
    name, layout = case
    env = data.draw(sizes(layout.phase))
    quant = QuantConfig.resolve(load_model_config(name), "DISABLED", None)
    est, profile = estimator(name, layout, device, traces, "DISABLED"), load_device(device)
    step = est.estimate(env).device_s
    model, tp = load_model_config(name), layout.parallel.tensor_parallel_size
    embedding = 2 * model.hidden_size * (-(-model.vocab_size // 64) * 64) / tp
    assert step >= (weight_bytes(est.trace, quant) - embedding) / profile.memory_bandwidth.value
    flops = sum(product_flops(est.trace, env, ParallelConfig()).values())
    assert step >= float(flops) / profile.peak_flops["bfloat16"].value


# -- more work never takes less time --------------------------------------------------------------------------------

BATCHES = np.unique(np.concatenate([np.arange(1, 130), np.geomspace(130, 4096, 60).astype(int)]))
CONTEXTS = np.unique(np.concatenate([np.arange(8, 140), np.geomspace(140, 2**20, 90).astype(int)]))
QUERIES = np.unique(np.concatenate([np.arange(2, 140), np.geomspace(140, 32768, 90).astype(int)]))


def grids(phase: Phase) -> dict[str, dict[str, Any]]:
    """Sizes of which one grows and the others stay."""
    if phase is Phase.PREFILL:
        return {
            "batch": {"B": BATCHES, "Q": 700, "S": 700},
            "batch of short prompts": {"B": BATCHES, "Q": 2, "S": 2},
            "prompt": {"B": 1, "Q": QUERIES, "S": QUERIES},
            "prompts": {"B": 48, "Q": QUERIES, "S": QUERIES},
            "chunk": {"B": 2, "Q": QUERIES, "S": 40000},
            "chunk after a prefix": {"B": 2, "Q": QUERIES, "S": QUERIES + 5000},
            "prefix": {"B": 3, "Q": 8, "S": CONTEXTS},
        }
    return {
        "batch": {"B": BATCHES, "Q": 1, "S": 4096},
        "batch of verifications": {"B": BATCHES, "Q": 4, "S": 200},
        "context": {"B": 1, "Q": 1, "S": CONTEXTS},
        "contexts": {"B": 96, "Q": 2, "S": CONTEXTS},
        "draft tokens": {"B": 16, "Q": np.arange(1, 9), "S": 1000},
        "draft tokens of one": {"B": 1, "Q": np.arange(1, 9), "S": 128},
    }


@pytest.mark.parametrize("name", ALL)
def test_more_work_takes_no_less_time(name: str, traces: Traces) -> None:
    """Steps over batch, context and query length: both phases, several devices, quantised or not, spread layouts."""
    every = layouts(name, max_tp=16)
    for layout in every[:: len(every) // 4]:
        for device, action in itertools.product(DEVICES, (None, "FP8")):
            est = estimator(name, layout, device, traces, action)
            for what, env in grids(layout.phase).items():
                try:
                    steps = np.asarray(seconds(est, env))
                except ConfigError:
                    break
                at = falls(steps)
                assert not len(at), (what, device, action, layout, worst(est, env, at))


@given(data=st.data(), case=cases(free=True), action=st.sampled_from(ACTIONS))
@examples(12)
def test_no_op_gets_faster_by_more_work(
    data: st.DataObject, case: tuple[str, Layout], action: str | None, traces: Traces
) -> None:
    """Op by op on every device there is, so that no op hides behind the others of its step."""
    name, layout = case
    what, env = data.draw(st.sampled_from(sorted(grids(layout.phase).items())))
    parts = {id(s.part): s.part for s in estimator(name, layout, "H100_SXM", traces, action).segments}
    table = DimTable(env)
    for op in (op for part in parts.values() for op in part.ops):
        cost = COSTS.get(op.name)(table.op(op))
        if cost.free or cost.collective or np.ndim(cost.flops) == np.ndim(cost.nbytes) == 0:
            continue
        for device in device_names():
            try:
                times = np.asarray(kernel_seconds(cost, load_device(device)))
            except ConfigError:
                continue
            assert not len(falls(times)), (what, device, action, layout, op.name, op.module)


def falls(values: np.ndarray) -> np.ndarray:
    """Indices after which the value is lower, beyond rounding."""
    return np.flatnonzero(np.diff(values) < -1e-9 * values[:-1])


def worst(est: StepEstimator, env: Mapping[str, Any], at: np.ndarray) -> str:
    """The op that loses most where the step gets faster."""
    grown = next(key for key, value in env.items() if isinstance(value, np.ndarray))
    one, two = ({k: (v[i] if isinstance(v, np.ndarray) else v) for k, v in env.items()} for i in (at[0], at[0] + 1))
    before, after = est.estimate(one).ops, est.estimate(two).ops
    loser = min(zip(before, after, strict=True), key=lambda pair: pair[1].total_s - pair[0].total_s)
    op, later = loser
    times = f"{op.total_s} -> {later.total_s}, {op.bound}"
    return f"{grown} {one[grown]} -> {two[grown]}: {op.name} {op.module} {times}"
