"""The answer to a question about KV capacity, as values."""

from __future__ import annotations

from dataclasses import dataclass

from tensor_cast.engine.kv_groups import Capacity
from tensor_cast.pipeline_partition import DsaSplit, Partition, spell
from tensor_cast.units import GIB

__all__ = ["CapacityPlan", "StageMemory"]


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one rank of a pipeline stage.

    Args:
        layers: decoder layers of the stage.
        device: usable memory of the device.
        budget: what the engine may take of it.
        weights: parameters; None where the model cannot be traced.
        non_torch: outside the allocator, and the attention backends' workspaces.
        activation: peak of the profile run.
        graph: captured graphs, as far as the engine subtracts them.
        kv: left for the KV cache, or as given by the user; negative where the stage does not fit.
    """

    layers: range
    device: int
    budget: int
    weights: int | None
    non_torch: int | None
    activation: int | None
    graph: int | None
    kv: int

    @property
    def beyond_device(self) -> int:
        """Bytes by which weights and KV memory exceed the device; above 0 only where the KV memory is given."""
        return max(0, (self.weights or 0) + self.kv - self.device)


@dataclass(frozen=True)
class CapacityPlan:
    """Capacity of one partition.

    Args:
        partition: layers of each stage.
        stages: memory of each stage.
        capacity: blocks and tokens.
        bytes_per_token: of each stage, over the caches of all its layers.
        unsafe: for each stage, layers that would reuse indices across its border, whatever is done about them.
        split: what is done; None when there are none, or when the partition is refused.
        equivalents: layers that each stage runs in a step, the draft layer once for each of its passes.
        refused: the partition has unsafe layers and nothing says how to go on.
        kv_given: the KV memory is the user's, no estimate.
    """

    partition: Partition
    stages: tuple[StageMemory, ...]
    capacity: Capacity
    bytes_per_token: tuple[int, ...]
    unsafe: tuple[tuple[int, ...], ...]
    split: DsaSplit | None
    equivalents: tuple[int, ...]
    refused: bool = False
    kv_given: bool = False

    @property
    def unsafe_layers(self) -> tuple[int, ...]:
        """Of all stages."""
        return tuple(layer for stage in self.unsafe for layer in stage)

    @property
    def own_indexer_layers(self) -> tuple[int, ...]:
        """Unsafe layers that are given an indexer, and so are safe."""
        return self.unsafe_layers if self.split is DsaSplit.SELF_COMPUTE else ()

    @property
    def has_blocks(self) -> bool:
        """Whether the KV memory of every stage holds a block."""
        return self.capacity.num_blocks > 0

    @property
    def fits(self) -> bool:
        """Whether every stage holds a block, and its device the weights and the KV memory."""
        return self.has_blocks and not any(stage.beyond_device for stage in self.stages)

    def shortage(self) -> str:
        """Which stage holds no block, why, and what to do; for a plan that has none."""
        index = min(range(len(self.stages)), key=lambda i: (self.capacity.ranks[i].num_blocks, self.stages[i].kv))
        stage, block = self.stages[index], f"a block of {self.capacity.ranks[index].block_bytes:,} bytes"
        where = f"stage {index} of partition {spell(self.partition)}"
        if self.kv_given:
            return (
                f"{where} is given {stage.kv / GIB:,.3f} GiB of KV memory, less than {block}; give more with "
                "--kv-memory-gib, or choose a smaller --block-size"
            )
        parts = {"weights": stage.weights, "non-torch": stage.non_torch, "activation": stage.activation}
        parts["graphs"] = stage.graph
        listed = ", ".join(f"{name} {value / GIB:,.2f}" for name, value in parts.items() if value is not None)
        remedy = "raise tp_size or pp_size, quantise the weights, or move layers to another stage"
        remedy = f", less than {block}; choose a smaller --block-size, {remedy}" if stage.kv > 0 else f"; {remedy}"
        return f"{where}: of {stage.budget / GIB:,.2f} GiB, {listed} leave {stage.kv / GIB:,.2f}{remedy}"

    @property
    def idle_bytes(self) -> int:
        """Most KV memory that a rank cannot use because another stage has fewer blocks."""
        return max(rank.idle for rank in self.capacity.ranks)
