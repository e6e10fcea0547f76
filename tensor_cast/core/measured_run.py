"""A measured start-up set beside our own account of the same run, and refused where the two cannot be of one run."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NoReturn

from tensor_cast.core.calibration import Calibration
from tensor_cast.core.capacity_config import CapacityConfig
from tensor_cast.core.measured import ROUNDING, Measured, StageResidual
from tensor_cast.core.start_up import RankMemory, StartUp, talking_ranks
from tensor_cast.engine.kv_cache import cache_layers, indexer_layers
from tensor_cast.engine.kv_formats import resolve_kv_format
from tensor_cast.engine.kv_groups import Capacity, build_groups, plan_pool
from tensor_cast.errors import ConfigError, MsModelingError
from tensor_cast.model_catalog import load_model_config
from tensor_cast.model_config import ParallelConfig
from tensor_cast.parallel import check
from tensor_cast.pipeline_partition import (
    DsaSplit,
    Partition,
    check_partition,
    default_partition,
    stage_ranges,
    unsafe_by_stage,
)
from tensor_cast.units import GIB

__all__ = ["measure"]

#: Share by which the memory of two devices of one kind differs at most (drivers, error correction).
_SAME_DEVICE = 0.05
#: GiB by which a sum may be missed where somebody wrote the numbers down, or the engine prints no account (SGLang).
_LOOSE = 0.25
#: Share by which the budget is uncertain where the file does not say how much memory the device has.
_USUAL_MEMORY = 0.015
#: What our weights and buffers may exceed the measured ones by: GiB, or share of ours.
_TOO_LITTLE = (0.25, 0.01)
#: What they may leave unexplained: context and communication take up to 2.2 GiB in the start-ups we know; all-to-all
#: buffers, vision towers and the like come on top.
_TOO_MUCH = (5.0, 0.2)


@dataclass(frozen=True)
class _Run:
    """The measured run: what its memory and its cache depend on."""

    start_up: StartUp
    parallel: ParallelConfig
    partition: Partition
    flips: tuple[tuple[int, ...], ...]

    @property
    def layout(self) -> str:
        p = self.parallel
        sizes = (
            ("TP", p.tensor_parallel_size),
            ("PP", len(self.partition)),
            ("DP", p.data_parallel_size),
            ("EP", p.expert_parallel_size),
            ("DCP", p.decode_context_parallel_size),
        )
        return " ".join(f"{name}{size}" for name, size in sizes if size > 1) or "one rank"


def measure(
    calibration: Calibration,
    asked: CapacityConfig,
    start_up: StartUp,
    parallel: ParallelConfig,
    rank_memory: Callable[[StartUp, ParallelConfig], RankMemory],
) -> Measured:
    """What ``calibration`` leaves once our weights are taken off.

    Args:
        calibration: what was measured.
        asked: what the user asks; what a file of numbers leaves out is as asked.
        start_up: what the engine would be started with as asked.
        parallel: the layout asked for.
        rank_memory: our account of the ranks of a layout.

    Raises:
        ConfigError: the measured run cannot be one of this model on this device in its layout.
    """
    source = calibration.source
    other = _other_model(calibration.model, asked.model, start_up.model.model_id)
    device_gib = start_up.device.usable_memory_bytes.value / GIB
    try:
        run = _run(calibration, asked, start_up, parallel)
        memory = rank_memory(run.start_up, run.parallel)
        weights = tuple(
            memory.weights(stage.start, stage.stop, extra_indexers=len(flips))
            for stage, flips in zip(stage_ranges(run.partition), run.flips, strict=True)
        )
        workspace, tables = memory.buffers, memory.buffers - memory.workspaces.persistent
    except MsModelingError as error:
        raise ConfigError(_unfit(calibration, asked.model, other, error)) from error
    measured = Measured(
        calibration=calibration,
        partition=run.partition,
        weights=weights,
        workspace=workspace,
        usable=(calibration.total_gib or device_gib) * GIB,
        utilization=calibration.gpu_memory_utilization or start_up.utilization,
        tables=tables,
        layout=run.layout,
        communication=_communication(start_up, run.parallel, parallel),
        alone=int(start_up.engine.non_torch_gib_for(1) * GIB),
        predicted=_predict(run, asked, calibration),
        other_model=other,
    )
    for index, stage in enumerate(measured.stages):
        _check_sum(measured, index, stage)
    if calibration.total_gib is not None and abs(calibration.total_gib / device_gib - 1) > _SAME_DEVICE:
        raise ConfigError(
            f"--calibrate-from {source}: was measured on a device of {calibration.total_gib:,.2f} GiB, "
            f"{start_up.device.name} has {device_gib:,.2f}; give the --device of the measured run"
        )
    for index, stage in enumerate(measured.stages):
        _check_residual(measured, asked, index, stage)
    return measured


def _communication(start_up: StartUp, measured: ParallelConfig, asked: ParallelConfig) -> int:
    """Bytes of communicators on the ranks asked for, less those on the measured ones.

    By the engine's profile: a rank alone has none, and the first one that it makes brings the library's buffers.
    """
    before, after = (
        start_up.engine.non_torch_gib_for(talking_ranks(start_up.model, layout)) for layout in (measured, asked)
    )
    return int((after - before) * GIB)


def _unfit(calibration: Calibration, model: str, other: str | None, error: MsModelingError) -> str:
    """Why the measured run cannot be one of the model, and whose the numbers are that the reason names."""
    names = ("tp_size", "pp_size", "dp_size", "dcp_size", "num_mtp_tokens", "pp_layer_partition", "kv_cache_dtype")
    said = {name: getattr(calibration, name) for name in names if getattr(calibration, name) is not None}
    what = "file" if calibration.engine is None else "log"
    values = ", ".join(
        f"{name} {','.join(map(str, value)) if isinstance(value, tuple) else value}" for name, value in said.items()
    )
    says = f" (the {what} says {values})" if said else ""
    log_of = f" The log is of {other}, MODEL is {model}." if other else ""
    return f"--calibrate-from {calibration.source}: the measured run{says} does not go with {model}: {error}.{log_of}"


def _run(calibration: Calibration, asked: CapacityConfig, start_up: StartUp, parallel: ParallelConfig) -> _Run:
    """The measured run; what the file does not say is as asked."""
    model, partition = start_up.model, calibration.pp_layer_partition
    count = len(calibration.stages)
    pp = calibration.pp_size or (len(partition) if partition else count)
    if pp != count:
        raise ConfigError(f"it has {count} stage(s), of a run with {pp}; give every stage")
    tp = calibration.tp_size
    if tp is None:
        if count != asked.pp_size:
            raise ConfigError(
                f"it has {count} stage(s) where --pp-size {asked.pp_size} is asked for, and does not say tp_size; give "
                "the tp_size of the measured run (in the file, or --measured-tp-size)"
            )
        tp = asked.tp_size
    dp = calibration.dp_size or asked.dp_size
    if calibration.expert_parallel is not None:
        ep = tp * dp if calibration.expert_parallel and model.is_moe else 1
    else:
        ep = asked.ep_size if tp * dp == asked.tp_size * asked.dp_size else 1
    copies = (
        parallel.moe_data_parallel_size if ep == asked.ep_size and (tp, dp) == (asked.tp_size, asked.dp_size) else 1
    )
    partition = partition or default_partition(model.num_hidden_layers, pp)
    check_partition(partition, model.num_hidden_layers, pp)
    drafts = asked.num_mtp_tokens if calibration.num_mtp_tokens is None else calibration.num_mtp_tokens
    layout = replace(
        parallel,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        data_parallel_size=dp,
        expert_parallel_size=ep,
        moe_data_parallel_size=copies,
        decode_context_parallel_size=calibration.dcp_size or asked.dcp_size,
    )
    check(
        model,
        layout,
        dcp_semantics=start_up.dcp_semantics,
        block_size=start_up.block_size,
        quant_block=start_up.quant.block,
        num_mtp_tokens=drafts,
    )
    dtype = calibration.kv_cache_dtype
    form = (
        start_up.form
        if dtype is None
        else resolve_kv_format(model, start_up.quant.kv_dtype if dtype == "auto" else dtype)
    )
    changed = replace(
        start_up,
        form=form,
        max_model_len=calibration.max_model_len or start_up.max_model_len,
        max_batched_tokens=calibration.max_num_batched_tokens or start_up.max_batched_tokens,
        num_mtp_tokens=drafts,
    )
    full = indexer_layers(model)
    none: tuple[tuple[int, ...], ...] = ((),) * pp
    flips = unsafe_by_stage(partition, full) if full and asked.dsa_split is DsaSplit.SELF_COMPUTE else none
    return _Run(changed, layout, tuple(partition), flips)


def _predict(run: _Run, asked: CapacityConfig, calibration: Calibration) -> Capacity | None:
    """Blocks and tokens that we make of the measured KV memory; None where a stage has none."""
    room = [stage.kv_gib for stage in calibration.stages]
    if None in room:
        return None
    s = run.start_up
    caches = cache_layers(
        s.model,
        run.parallel,
        block_size=s.block_size,
        kv_dtype=s.form.name,
        dcp_semantics=s.dcp_semantics,
        num_mtp_tokens=s.num_mtp_tokens,
        extra_indexers=tuple(layer for layers in run.flips for layer in layers),
    )
    stages = list(stage_ranges(run.partition))
    stages[-1] = range(stages[-1].start, stages[-1].stop + s.model.num_nextn_predict_layers)
    return plan_pool(
        build_groups(caches, hybrid=asked.hybrid_kv_cache),
        stages,
        [int(gib * GIB) for gib in room if gib is not None],
        max_model_len=s.max_model_len,
        dcp=run.parallel.decode_context_parallel_size,
        in_flight=s.in_flight(len(stages)),
    )


def _check_sum(measured: Measured, index: int, stage: StageResidual) -> None:
    """What the engine used and kept, and the KV cache, are what it took of the device."""
    calibration = measured.calibration
    share, total = calibration.gpu_memory_utilization, calibration.total_gib
    if share is None or stage.kv is None:
        return
    budget = measured.budget(share)
    slack = _slack(measured, stage)
    if total is None:
        slack += _USUAL_MEMORY * budget
    # Nobody says what SGLang keeps for activations, and a graph estimate need not be printed.
    used = stage.consumed if stage.stated is None else stage.stated
    rest = budget - used - stage.kv
    source = calibration.stages[index]
    may_keep = 0.0
    if stage.stated is None:
        may_keep = float(budget)
    elif source.consumed_gib is None:
        estimate = source.graph_estimate_gib
        may_keep = (2 * (source.graph_gib or 0.0) if estimate is None else estimate) * GIB
    if -slack <= rest <= may_keep + slack:
        return
    of = f"{share:g} x {total:,.2f} = " if total is not None else f"{share:g} of the device, "
    kept = "" if stage.stated is None else " and the activation peak"
    raise ConfigError(
        f"--calibrate-from {calibration.source}: stage {index} does not add up: weights, non-torch memory{kept} "
        f"({used / GIB:,.2f} GiB) and the KV memory ({stage.kv / GIB:,.2f}) make {(used + stage.kv) / GIB:,.2f} GiB, "
        f"the engine took {of}{budget / GIB:,.2f}; is a number of another start, or of another device?"
    )


def _slack(measured: Measured, stage: StageResidual) -> float:
    loose = measured.calibration.engine is None or stage.stated is None
    return (_LOOSE if loose else ROUNDING) * GIB


def _check_residual(measured: Measured, asked: CapacityConfig, index: int, stage: StageResidual) -> None:
    ours = stage.weights + stage.workspace
    low, high = -max(_TOO_LITTLE[0] * GIB, _TOO_LITTLE[1] * ours), max(_TOO_MUCH[0] * GIB, _TOO_MUCH[1] * ours)
    if stage.peak < -_slack(measured, stage):
        _refuse(measured, asked, index, stage, f"and {-stage.peak / GIB:,.2f} GiB less than nothing for activations")
    if not low <= stage.residual <= high:
        _refuse(measured, asked, index, stage, f"which leaves {stage.residual / GIB:,.2f} GiB outside the allocator")


def _refuse(measured: Measured, asked: CapacityConfig, index: int, stage: StageResidual, what: str) -> NoReturn:
    buffers = f" and {stage.workspace / GIB:,.2f} of buffers" if stage.workspace else ""
    log_of = f" The log is of {measured.other_model}." if measured.other_model else ""
    raise ConfigError(
        f"--calibrate-from {measured.calibration.source}: stage {index} (layers {stage.layers.start}-"
        f"{stage.layers.stop - 1}, {measured.layout}) cannot be {asked.model}: measured are "
        f"{stage.consumed / GIB:,.2f} GiB for weights and non-torch memory, our weights take "
        f"{stage.weights / GIB:,.2f}{buffers}, {what}. Another model, another layout "
        "(--measured-tp-size, --measured-pp-layer-partition) or another dtype of the weights "
        f"(--quantize-linear-action)?{log_of}"
    )


def _other_model(named: str | None, *asked: str) -> str | None:
    """The model that the log names, unless it is the one asked for, under any of its names."""
    if named is None or _bare(named) in {_bare(name) for name in asked}:
        return None
    try:
        return None if load_model_config(named).model_id in asked else named
    except MsModelingError:
        return named


def _bare(name: str) -> str:
    """A model's name without its owner, folder and spelling."""
    in_cache = re.search(r"models--[^/]*?--([^/]+)", name)
    last = in_cache[1] if in_cache else name.rstrip("/").rpartition("/")[2]
    return re.sub(r"[^a-z0-9]+", "-", last.casefold())
