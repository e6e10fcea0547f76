"""KV capacity of a layout, as its engine computes it at start-up: memory of each stage, blocks, tokens, what binds.

``kv = ceil(usable * utilisation) - weights - non-torch - activation peak - graphs`` on every rank; the ranks then agree
on the smallest number of blocks. Source: vLLM 0.30 ``v1/core/kv_cache_utils.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from math import inf

from tensor_cast.core.capacity_plan import CapacityPlan
from tensor_cast.core.stage_planner import StagePlanner
from tensor_cast.engine.kv_cache import CacheLayer, cache_layers
from tensor_cast.engine.kv_groups import CacheGroup, RequestBlocks, build_groups, plan_pool, request_blocks, with_drafts
from tensor_cast.engine.kv_specs import IndexerSpec
from tensor_cast.errors import ConfigError, InfeasibleError
from tensor_cast.model_config import AttentionKind
from tensor_cast.pipeline_partition import (
    AUTO,
    DsaSplit,
    Partition,
    all_partitions,
    best_partition,
    check_partition,
    default_partition,
    layer_equivalents,
    parse_partition,
    refuse_unsafe,
    spell,
    stage_ranges,
    unsafe_by_stage,
    unsafe_layers,
)

__all__ = ["CapacityPlanner"]

#: What stands for every partition where one is asked for.
ALL = "all"


class CapacityPlanner(StagePlanner):
    """Plans any partition of one layout; each stage is sized once. Arguments are those of its base."""

    # -- partitions ------------------------------------------------------------------------------------------------

    def partition(self) -> Partition:
        """The partition that is asked for: given, the best, or the engine's own.

        For ``all`` the engine's own, or the best where the engine's own is refused.

        Raises:
            InfeasibleError: the best is wanted, and no split fits.
            ConfigError: as :meth:`best`.
        """
        layers, stages, asked = self.model.num_hidden_layers, self.config.pp_size, self.config.pp_layer_partition
        if asked is not None and asked not in (AUTO, ALL):
            return parse_partition(asked, layers, stages)
        if asked != AUTO:
            if asked == ALL:
                self._need_estimate()
            own = default_partition(layers, stages)
            check_partition(own, layers, stages)
            if asked is None or not self.refuses(own):
                return own
        best = self.best()
        if best is None:
            raise InfeasibleError(self._nothing_fits())
        return best

    def refuses(self, partition: Partition) -> bool:
        """Whether the partition has unsafe layers and nothing says how to go on."""
        return self.config.dsa_split is None and bool(self.full and unsafe_layers(partition, self.full))

    def best(self, *, safe: bool = False) -> Partition | None:
        """The partition with most KV blocks, exactly. None if none fits.

        Args:
            safe: only partitions without unsafe layers count, as always without ``dsa_split``.

        Raises:
            ConfigError: the KV memory is given, which depends on the partition.
        """
        self._need_estimate()

        def cost(stage: int, start: int, end: int) -> float:
            if self.flips(start, end) and (safe or self.config.dsa_split is None):
                return inf
            room = self.stage(stage, start, end).kv
            blocks = room // self._block_bytes(start, end)
            return inf if blocks < 1 else -float(blocks)

        return best_partition(self.model.num_hidden_layers, self.config.pp_size, cost)[0]

    def _need_estimate(self) -> None:
        if self.config.kv_memory_gib is not None:
            raise ConfigError(
                "--kv-memory-gib gives the KV memory of one partition; to compare partitions leave it out, and use "
                "--calibrate-from to start from a measured one"
            )

    def all(self) -> Iterator[CapacityPlan]:
        """The plan of every partition; those that would be refused are marked, and computed as they are."""
        for partition in all_partitions(self.model.num_hidden_layers, self.config.pp_size):
            yield self.plan(partition, mark_refused=True)

    def plan(self, partition: Partition | None = None, *, mark_refused: bool = False) -> CapacityPlan:
        """Capacity of ``partition``; of the one that is asked for by default.

        Args:
            partition: layers of each stage.
            mark_refused: mark a partition with unsafe layers instead of refusing it.

        Raises:
            LegalityError: unsafe layers, and nothing says how to go on.
            ConfigError: the KV memory is given for another number of stages.
        """
        partition = partition or self.partition()
        unsafe = unsafe_by_stage(partition, self.full) if self.full else ((),) * len(partition)
        split = self.config.dsa_split
        if not mark_refused:
            refuse_unsafe(partition, self.full, split)
        stages = stage_ranges(partition)
        memory = tuple(self.stage(i, stage.start, stage.stop) for i, stage in enumerate(stages))
        flips = [layer for layers in unsafe for layer in layers] if split is DsaSplit.SELF_COMPUTE else []
        groups = self._groups(tuple(flips))
        capacity = plan_pool(
            groups,
            [self._with_drafts(stage) for stage in stages],
            [stage.kv for stage in memory],
            max_model_len=self.max_model_len,
            dcp=self.config.dcp_size,
            in_flight=self._in_flight,
        )
        return CapacityPlan(
            partition=partition,
            stages=memory,
            capacity=capacity,
            bytes_per_token=tuple(self._token_bytes(self._with_drafts(s), tuple(flips)) for s in stages),
            unsafe=unsafe,
            split=split if any(unsafe) else None,
            equivalents=layer_equivalents(partition, self.config.num_mtp_tokens),
            refused=self.refuses(partition),
            kv_given=self.config.kv_memory_gib is not None,
        )

    def resident(self, plan: CapacityPlan, length: int) -> int:
        """Requests of ``length`` tokens that stay resident at once, in whole blocks beside the null block."""
        slots = with_drafts(length, self.config.num_mtp_tokens, self.max_model_len)
        return self._request_blocks(plan, slots).fitting(plan.capacity.usable_blocks)

    def longest_request(self, plan: CapacityPlan) -> int:
        """Tokens of the longest request that fits beside the null block; 0 if none does."""
        fits, beyond = 0, max(2, plan.capacity.max_model_len) + 1
        while beyond - fits > 1:
            middle = (fits + beyond) // 2
            if self._request_blocks(plan, middle).admitted <= plan.capacity.usable_blocks:
                fits = middle
            else:
                beyond = middle
        return fits

    def blocks_by_group(self, plan: CapacityPlan) -> list[tuple[CacheGroup, int]]:
        """Groups of the caches of all stages, with the blocks that the longest request takes of each."""
        tokens, dcp, in_flight = self.max_model_len, self.config.dcp_size, self._in_flight
        groups = self._groups(plan.own_indexer_layers)
        return [(group, group.spec.admission_blocks(tokens, dcp=dcp, in_flight=in_flight)) for group in groups]

    def _request_blocks(self, plan: CapacityPlan, tokens: int) -> RequestBlocks:
        groups = self._groups(plan.own_indexer_layers)
        return request_blocks(groups, tokens, dcp=self.config.dcp_size, in_flight=self._in_flight)

    @property
    def _in_flight(self) -> int:
        return self.start_up.in_flight(self.config.pp_size)

    # -- caches ----------------------------------------------------------------------------------------------------

    def _caches(self, flips: tuple[int, ...]) -> tuple[CacheLayer, ...]:
        return cache_layers(
            self.model,
            self.parallel,
            block_size=self.block_size,
            kv_dtype=self.form.name,
            dcp_semantics=self.semantics,
            num_mtp_tokens=self.config.num_mtp_tokens,
            extra_indexers=flips,
        )

    def _groups(self, flips: tuple[int, ...] = ()) -> tuple[CacheGroup, ...]:
        if flips not in self._known_groups:
            self._known_groups[flips] = build_groups(self._caches(flips), hybrid=self.config.hybrid_kv_cache)
        return self._known_groups[flips]

    @cached_property
    def _known_groups(self) -> dict[tuple[int, ...], tuple[CacheGroup, ...]]:
        return {}

    def _with_drafts(self, stage: range) -> range:
        last = stage.stop == self.model.num_hidden_layers
        return range(stage.start, stage.stop + self.model.num_nextn_predict_layers) if last else stage

    def _block_bytes(self, start: int, end: int) -> int:
        stage = self._with_drafts(range(start, end))
        base = max(group.block_bytes(stage) for group in self._groups())
        if self.config.dsa_split is not DsaSplit.SELF_COMPUTE:
            return base
        return base + len(self.flips(start, end)) * self._indexer_page

    @cached_property
    def _indexer_page(self) -> int:
        if self.model.attention is not AttentionKind.DSA:
            return 0
        return next(c.spec.page_bytes for c in self._caches(()) if isinstance(c.spec, IndexerSpec))

    def _token_bytes(self, stage: range, flips: tuple[int, ...]) -> int:
        """Bytes that a token adds on a rank of the stage, over its share of the tokens."""
        return sum(c.spec.token_bytes for c in self._caches(flips) if c.layer in stage)

    def _nothing_fits(self) -> str:
        layers, stages = self.model.num_hidden_layers, self.config.pp_size
        own = self.plan(default_partition(layers, stages), mark_refused=True)
        safe = " that is safe without --dsa-split" if self.full and self.config.dsa_split is None else ""
        found = f"no split{safe} of {layers} layers over {stages} stages leaves room for a KV cache: "
        if own.has_blocks:  # else it would be the best
            return f"{found}the engine's own, {spell(own.partition)}, has room, but needs --dsa-split"
        return found + own.shortage()
