"""A capacity plan beside others, and its public JSON form."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import Any

from tensor_cast.core.capacity import ALL, CapacityPlanner
from tensor_cast.core.capacity_plan import CapacityPlan, StageMemory
from tensor_cast.core.measured_report import measured_json
from tensor_cast.engine.kv_groups import CacheGroup
from tensor_cast.errors import InfeasibleError
from tensor_cast.pipeline_partition import DsaSplit, Partition, default_partition, nearest_safe_partitions, spell
from tensor_cast.units import GIB

__all__ = ["compare", "notes", "require_room", "split_heading", "split_note", "to_json"]

#: Safe partitions shown beside an unsafe one, and how many of the nearest are weighed for that.
_NEAREST, _WEIGHED = 2, 12


#: Of layers that a stage starts with and that compute no top-k indices, by ``--dsa-split``: a heading for their
#: numbers, and a sentence that ends with them.
_SPLITS = {
    DsaSplit.SELF_COMPUTE: ("own indexer", "Layers given an indexer of their own"),
    DsaSplit.SEND_INDICES: ("indices sent", "Layers whose top-k indices are sent by the stage before"),
    DsaSplit.UNSAFE: ("UNSAFE", "UNSAFE, outputs are wrong: layers that read top-k indices which nobody wrote"),
    None: (
        "without indices",
        "Refused without --dsa-split: layers that would read top-k indices never written on their stage",
    ),
}


def split_heading(planner: CapacityPlanner) -> str:
    """What a column of unsafe layers is called."""
    return _SPLITS[planner.config.dsa_split][0]


def split_note(plan: CapacityPlan) -> str:
    """What is done about the plan's unsafe layers; empty where there are none."""
    return f"{_SPLITS[plan.split][1]}: {', '.join(map(str, plan.unsafe_layers))}" if plan.unsafe_layers else ""


def notes(planner: CapacityPlanner, plan: CapacityPlan) -> list[str]:
    """What a reader of the plan must know beside its numbers, one sentence each."""
    capacity = plan.capacity
    found = []
    for index, stage in enumerate(plan.stages):
        if stage.beyond_device:
            weights = "" if stage.weights is None else f"weights {stage.weights / GIB:,.2f} and "
            found.append(
                f"Does not fit: stage {index} needs {weights}KV memory {stage.kv / GIB:,.2f} GiB, as given; a device "
                f"has {stage.device / GIB:,.2f}"
            )
    if not capacity.starts:
        found.append(
            f"The engine refuses to start: {capacity.max_model_len:,} tokens take {capacity.blocks_per_request:,} "
            f"blocks beside the null block; {planner.longest_request(plan):,} would fit (--max-model-len)"
        )
    if 0 < (positions := planner.model.max_position_embeddings) < capacity.max_model_len:
        found.append(
            f"A request of {capacity.max_model_len:,} tokens is longer than the model's max_position_embeddings "
            f"{positions:,}"
        )
    own = default_partition(planner.model.num_hidden_layers, planner.config.pp_size)
    if planner.config.pp_layer_partition == ALL and plan.partition != own:
        found.append(
            f"The engine's own partition, {spell(own)}, is refused without --dsa-split; this is the best safe one"
        )
    return [*found, *filter(None, [split_note(plan)])]


def require_room(plan: CapacityPlan) -> None:
    """Refuse a plan in which a stage has no room for a single block.

    Raises:
        InfeasibleError: names the stage and what it lacks.
    """
    if not plan.has_blocks:
        raise InfeasibleError(f"no room for a KV cache: {plan.shortage()}")


def compare(planner: CapacityPlanner, plan: CapacityPlan) -> list[tuple[str, CapacityPlan]]:
    """Other partitions beside ``plan``: (what it is, its plan); empty for a single stage.

    With ``all`` every partition; else the one asked for, the engine's own, the best, and where that one parts layers
    that share top-k indices also the best safe one and those nearest to it.
    """
    config = planner.config
    if config.pp_size == 1 or config.kv_memory_gib is not None:
        return []
    named: dict[Partition, list[str]] = {}
    if config.pp_layer_partition != ALL:
        named[plan.partition] = ["this one"]
    named.setdefault(default_partition(planner.model.num_hidden_layers, config.pp_size), []).append("engine's own")
    best, safe = planner.best(), planner.best(safe=True)
    if best is not None:
        named.setdefault(best, []).append("best")
    if safe not in (None, best) and (plan.unsafe_layers or config.pp_layer_partition == ALL):
        named.setdefault(safe, []).append("best safe")
    if config.pp_layer_partition == ALL:
        return [("; ".join(named.get(row.partition, ())), row) for row in planner.all()]
    if plan.unsafe_layers:
        for partition in _nearest_safe(planner, plan):
            if not any("safe" in note for note in named.get(partition, ())):
                named.setdefault(partition, []).append("safe")
    return [("; ".join(words), planner.plan(p, mark_refused=True)) for p, words in sorted(named.items())]


def _nearest_safe(planner: CapacityPlanner, plan: CapacityPlan) -> list[Partition]:
    """Safe partitions nearest to the plan's; of those as near, the ones with more blocks."""

    def rank(partition: Partition) -> tuple[int, int]:
        starts = zip(accumulate(partition), accumulate(plan.partition), strict=True)
        moved = sum(abs(a - b) for a, b in starts)
        return moved, -planner.plan(partition, mark_refused=True).capacity.num_blocks

    return sorted(nearest_safe_partitions(plan.partition, planner.full, _WEIGHED), key=rank)[:_NEAREST]


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


def _group_json(group: CacheGroup, blocks: int) -> dict[str, Any]:
    caches = Counter((page.kind, page.nbytes) for page in group.pages)
    return {
        "block_size": group.spec.block_size,
        "bytes_per_block": group.block_bytes(),
        "blocks_per_request": blocks,
        "caches": [{"kind": kind, "layers": n, "page_bytes": page} for (kind, page), n in caches.items()],
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
        "own_indexer_layers": list(plan.own_indexer_layers),
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
        "kv_groups": [_group_json(group, blocks) for group, blocks in planner.blocks_by_group(plan)],
        "notes": notes(planner, plan),
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
