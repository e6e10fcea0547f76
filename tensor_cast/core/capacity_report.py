"""A capacity plan beside others, and its public JSON form."""

from __future__ import annotations

from typing import Any

from tensor_cast.core.capacity import ALL, CapacityPlanner
from tensor_cast.core.capacity_plan import CapacityPlan, StageMemory
from tensor_cast.core.measured_report import measured_json
from tensor_cast.errors import InfeasibleError
from tensor_cast.pipeline_partition import default_partition, nearest_safe_partitions
from tensor_cast.units import GIB

__all__ = ["compare", "require_room", "to_json"]


def require_room(plan: CapacityPlan) -> None:
    """Refuse a plan in which a stage has no room for a single block.

    Raises:
        InfeasibleError: names the stage and what it lacks.
    """
    if plan.fits:
        return
    index = plan.capacity.binding_stage
    index = min(range(len(plan.stages)), key=lambda i: plan.stages[i].kv) if plan.stages[index].kv > 0 else index
    stage = plan.stages[index]
    parts = {"weights": stage.weights, "non-torch": stage.non_torch, "activation": stage.activation}
    listed = ", ".join(f"{name} {value / GIB:,.2f}" for name, value in parts.items() if value is not None)
    raise InfeasibleError(
        f"stage {index} of partition {','.join(map(str, plan.partition))} has no room for a KV cache: of "
        f"{stage.budget / GIB:,.2f} GiB, {listed} leave {stage.kv / GIB:,.2f}; raise tp_size or pp_size, quantise the "
        "weights, or move layers to another stage"
    )


def compare(planner: CapacityPlanner, plan: CapacityPlan) -> list[tuple[str, CapacityPlan]]:
    """Other partitions beside ``plan``: (what it is, its plan); empty for a single stage.

    With ``all`` every partition; else the one asked for, the engine's own, the best, and the nearest safe ones.
    """
    config = planner.config
    if config.pp_size == 1 or config.kv_memory_gib is not None:
        return []
    layers, stages = planner.model.num_hidden_layers, config.pp_size
    best, own = planner.best(), default_partition(layers, stages)
    if config.pp_layer_partition == ALL:
        names = {own: "engine's own", best: "best"} if best != own else {own: "engine's own, best"}
        return [(names.get(row.partition, ""), row) for row in planner.all()]
    named: dict[tuple[int, ...], list[str]] = {plan.partition: ["this one"]}
    named.setdefault(own, []).append("engine's own")
    if best is not None:
        named.setdefault(best, []).append("best")
    if plan.unsafe_layers:
        for safe in nearest_safe_partitions(plan.partition, planner.full, 2):
            named.setdefault(safe, []).append("safe")
    return [("; ".join(notes), planner.plan(p, mark_refused=True)) for p, notes in sorted(named.items())]


def _gib(value: int | None) -> float | None:
    return None if value is None else value / GIB


def _stage_json(index: int, stage: StageMemory, plan: CapacityPlan) -> dict[str, Any]:
    rank = plan.capacity.ranks[index]
    return {
        "stage": index,
        "layers": len(stage.layers),
        "first_layer": stage.layers.start,
        "weights_gib": _gib(stage.weights),
        "activation_gib": _gib(stage.activation),
        "non_torch_gib": _gib(stage.non_torch),
        "graph_gib": _gib(stage.graph),
        "kv_gib": stage.kv / GIB,
        "kv_allocated_gib": rank.allocated / GIB,
        "kv_idle_gib": rank.idle / GIB,
        "budget_gib": stage.budget / GIB,
        "bytes_per_token": plan.bytes_per_token[index],
        "bytes_per_block": rank.block_bytes,
        "num_blocks": rank.num_blocks,
        "layer_equivalents": plan.equivalents[index],
        "unsafe_layers": list(plan.unsafe[index]),
    }


def _plan_json(plan: CapacityPlan) -> dict[str, Any]:
    capacity = plan.capacity
    return {
        "partition": list(plan.partition),
        "num_blocks": capacity.num_blocks,
        "kv_tokens": capacity.kv_tokens,
        "max_concurrency": capacity.max_concurrency,
        "binding_stage": capacity.binding_stage,
        "unsafe_layers": list(plan.unsafe_layers),
        "dsa_split": None if plan.split is None else str(plan.split),
        "refused": plan.refused,
        "fits": plan.fits,
    }


def to_json(planner: CapacityPlanner, plan: CapacityPlan, rows: list[tuple[str, CapacityPlan]]) -> dict[str, Any]:
    """The public JSON form of ``msmodeling capacity``."""
    config, capacity = planner.config, plan.capacity
    document: dict[str, Any] = {
        "schema_version": 1,
        "inputs": {
            **config.model_dump(mode="json"),
            "engine": planner.engine.name,
            "dcp_semantics": planner.semantics,
            "kv_cache_dtype": planner.form.name,
            "block_size": planner.block_size,
            "max_model_len": planner.max_model_len,
            "max_num_batched_tokens": planner.start_up.max_batched_tokens,
            "max_num_seqs": planner.start_up.max_num_seqs,
            "gpu_memory_utilization": planner.start_up.utilization,
        },
        "stages": [_stage_json(i, stage, plan) for i, stage in enumerate(plan.stages)],
        **_plan_json(plan),
        "blocks_per_request": capacity.blocks_per_request,
        "starts": capacity.starts,
        "longest_request": planner.longest_request(plan),
    }
    if config.request_length is not None:
        document["resident_requests"] = {
            "length": config.request_length,
            "by_tokens": capacity.kv_tokens / config.request_length,
            "whole_blocks": planner.resident(plan, config.request_length),
        }
    if rows:
        document["partitions"] = [{"note": note, **_plan_json(row)} for note, row in rows]
    if planner.measured is not None:
        document["measured_run"] = measured_json(planner.measured)
        document["calibration"] = [
            {
                "stage": index,
                "kind": str(stage.kind),
                "consumed_gib": stage.consumed / GIB,
                "weights_gib": stage.weights / GIB,
                "workspace_gib": stage.workspace / GIB,
                "residual_gib": stage.residual / GIB,
                "activation_gib": (stage.peak - stage.graph) / GIB,
                "graph_gib": stage.graph / GIB,
                "kv_gib": _gib(stage.kv),
            }
            for index, stage in enumerate(planner.measured.stages)
        ]
    return document
