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
    DsaSplit,
    Partition,
    all_partitions,
    best_partition,
    check_partition,
    default_partition,
    layer_equivalents,
    parse_partition,
    refuse_unsafe,
    stage_ranges,
    unsafe_by_stage,
)
from tensor_cast.units import GIB

__all__ = ["CapacityPlanner"]

#: Values of ``--pp-layer-partition`` that are no partition.
AUTO, ALL = "auto", "all"


class CapacityPlanner(StagePlanner):
    """Plans any partition of one layout; each stage is sized once. Arguments are those of its base."""

    # -- partitions ------------------------------------------------------------------------------------------------

    def partition(self) -> Partition:
        """The partition that is asked for: given, the best, or the engine's own (also for ``all``).

        Raises:
            InfeasibleError: ``auto``, and no split fits.
        """
        layers, stages, asked = self.model.num_hidden_layers, self.config.pp_size, self.config.pp_layer_partition
        if asked == AUTO:
            best = self.best()
            if best is None:
                raise InfeasibleError(self._nothing_fits())
            return best
        if asked in (None, ALL):
            own = default_partition(layers, stages)
            check_partition(own, layers, stages)
            return own
        assert asked is not None
        return parse_partition(asked, layers, stages)

    def best(self) -> Partition | None:
        """The partition with most KV blocks, exactly; without ``dsa_split`` only safe ones count. None if none fits.

        Raises:
            ConfigError: the KV memory is given, which depends on the partition.
        """
        if self.config.kv_memory_gib is not None:
            raise ConfigError(
                "--kv-memory-gib gives the KV memory of one partition; to compare partitions leave it out, and use "
                "--calibrate-from to start from a measured one"
            )

        def cost(stage: int, start: int, end: int) -> float:
            flips = self.flips(start, end)
            if flips and self.config.dsa_split is None:
                return inf
            room = self.stage(stage, start, end).kv
            blocks = room // self._block_bytes(start, end)
            return inf if blocks < 1 else -float(blocks)

        return best_partition(self.model.num_hidden_layers, self.config.pp_size, cost)[0]

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
            in_flight=self.start_up.in_flight(self.config.pp_size),
        )
        return CapacityPlan(
            partition=partition,
            stages=memory,
            capacity=capacity,
            bytes_per_token=tuple(self._token_bytes(self._with_drafts(s), tuple(flips)) for s in stages),
            unsafe=unsafe,
            split=split if any(unsafe) else None,
            equivalents=layer_equivalents(partition, self.config.num_mtp_tokens),
            refused=any(unsafe) and split is None,
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

    def _request_blocks(self, plan: CapacityPlan, tokens: int) -> RequestBlocks:
        flips = plan.unsafe_layers if self.config.dsa_split is DsaSplit.SELF_COMPUTE else ()
        return request_blocks(
            self._groups(flips),
            tokens,
            dcp=self.config.dcp_size,
            in_flight=self.start_up.in_flight(self.config.pp_size),
        )

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
        partition = default_partition(self.model.num_hidden_layers, self.config.pp_size)
        stages = [self.stage(i, s.start, s.stop) for i, s in enumerate(stage_ranges(partition))]
        worst = min(range(len(stages)), key=lambda i: stages[i].kv)
        return (
            f"no split of {self.model.num_hidden_layers} layers over {self.config.pp_size} stages leaves room for a "
            f"KV cache: in {','.join(map(str, partition))} stage {worst} lacks {-stages[worst].kv / GIB:,.2f} GiB of "
            f"{stages[worst].budget / GIB:,.2f}; raise tp_size or pp_size, or quantise the weights"
        )
