"""The answer to a question about KV capacity, as values."""

from __future__ import annotations

from dataclasses import dataclass

from tensor_cast.engine.kv_groups import Capacity
from tensor_cast.pipeline_partition import DsaSplit, Partition

__all__ = ["CapacityPlan", "StageMemory"]


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one rank of a pipeline stage.

    Args:
        layers: decoder layers of the stage.
        budget: what the engine may take of the device.
        weights: parameters; None where the model cannot be traced.
        non_torch: outside the allocator, and the attention backends' workspaces.
        activation: peak of the profile run.
        graph: captured graphs, as far as the engine subtracts them.
        kv: left for the KV cache, or as given by the user; negative where the stage does not fit.
    """

    layers: range
    budget: int
    weights: int | None
    non_torch: int | None
    activation: int | None
    graph: int | None
    kv: int


@dataclass(frozen=True)
class CapacityPlan:
    """Capacity of one partition.

    Args:
        partition: layers of each stage.
        stages: memory of each stage.
        capacity: blocks and tokens.
        bytes_per_token: of each stage, over the caches of all its layers.
        unsafe: for each stage, layers that would reuse indices across its border.
        split: what is done about them; None when there are none, or when the partition is refused.
        equivalents: layers that each stage runs in a step, the draft layer once for each of its passes.
        refused: the partition has unsafe layers and nothing says how to go on.
    """

    partition: Partition
    stages: tuple[StageMemory, ...]
    capacity: Capacity
    bytes_per_token: tuple[int, ...]
    unsafe: tuple[tuple[int, ...], ...]
    split: DsaSplit | None
    equivalents: tuple[int, ...]
    refused: bool = False

    @property
    def unsafe_layers(self) -> tuple[int, ...]:
        """Of all stages."""
        return tuple(layer for stage in self.unsafe for layer in stage)

    @property
    def fits(self) -> bool:
        """Whether every stage has room for a KV cache at all."""
        return all(stage.kv > 0 for stage in self.stages) and self.capacity.num_blocks > 0

    @property
    def idle_bytes(self) -> int:
        """Most KV memory that a rank cannot use because another stage has fewer blocks."""
        return max(rank.idle for rank in self.capacity.ranks)
