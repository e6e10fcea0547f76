"""Groups of caches and division of memory: properties over random layers."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensor_cast.engine.kv_cache import CacheLayer
from tensor_cast.engine.kv_groups import build_groups, plan_pool
from tensor_cast.engine.kv_specs import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    IndexerSpec,
    KVCacheSpec,
    MlaSpec,
    RecurrentSpec,
    SlidingWindowSpec,
)
from tensor_cast.errors import UnsupportedModelError
from tensor_cast.units import ceil_div

#: A busy machine is no fault.
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

FULL = FullAttentionSpec(16, "bfloat16", 2, 64, 64)
HALF = FullAttentionSpec(16, "bfloat16", 1, 64, 64)
WINDOW = SlidingWindowSpec(16, "bfloat16", 2, 64, 64, window=128)
CHUNK = ChunkedLocalSpec(16, "bfloat16", 2, 64, 64, chunk=256)
STATE = RecurrentSpec(16, "bfloat16", 10_000)

layers = st.lists(st.sampled_from([FULL, HALF, WINDOW, CHUNK, STATE]), min_size=1, max_size=40)


def caches(specs: list[KVCacheSpec]) -> list[CacheLayer]:
    return [CacheLayer(i, spec) for i, spec in enumerate(specs)]


@relaxed
@given(layers)
def test_each_layer_is_in_one_group_and_keeps_its_bytes(specs: list[KVCacheSpec]) -> None:
    groups = build_groups(caches(specs))
    held = Counter(layer for group in groups for layer, _, _ in group.pages)
    assert held == Counter(range(len(specs)))
    for group in groups:
        for layer, _, page in group.pages:
            assert page >= specs[layer].page_bytes  # equal, a multiple, or padded
        assert len({type(specs[layer]) for layer, _, _ in group.pages}) == 1 or len(groups) == 1


@relaxed
@given(layers, st.integers(0, 10**8), st.integers(1, 10**5))
def test_blocks_fill_memory_and_no_more(specs: list[KVCacheSpec], room: int, length: int) -> None:
    groups = build_groups(caches(specs))
    pool = plan_pool(groups, [range(len(specs))], [room], max_model_len=length, in_flight=64)
    (rank,) = pool.ranks
    assert rank.allocated <= room < rank.allocated + rank.block_bytes
    assert rank.idle >= 0
    assert pool.blocks_per_request == sum(g.spec.admission_blocks(length, in_flight=64) for g in groups)
    # A request that the engine admits fits the blocks it can hand out.
    assert pool.starts == (pool.blocks_per_request <= pool.usable_blocks and pool.num_blocks > 0)


@relaxed
@given(layers, st.data())
def test_stages_share_the_blocks_of_the_smallest(specs: list[KVCacheSpec], data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(specs)))
    stages = [range(cut), range(cut, len(specs))] if cut < len(specs) else [range(cut)]
    rooms = [data.draw(st.integers(0, 10**8)) for _ in stages]
    pool = plan_pool(build_groups(caches(specs)), stages, rooms, max_model_len=4096)
    assert pool.num_blocks == min(rank.num_blocks for rank in pool.ranks)
    assert pool.ranks[pool.binding_stage].num_blocks == pool.num_blocks
    assert all(rank.allocated <= rank.available for rank in pool.ranks)


def test_caches_that_keep_everything_form_one_group() -> None:
    latent, keys = MlaSpec(64, "fp8_ds_mla", 512, 64), IndexerSpec(64, "fp8_ds_mla", 132)
    (group,) = build_groups([CacheLayer(0, latent), CacheLayer(0, keys), CacheLayer(1, latent)])
    assert group.block_bytes() == 64 * (2 * 656 + 132)
    assert group.block_bytes(range(1, 2)) == 64 * 656
    assert len(build_groups(caches([FULL, HALF, FULL]))) == 1


def test_smaller_pages_hold_more_tokens() -> None:
    # A page of HALF is half of WINDOW's: its block grows to 32 tokens, so its requests take half the blocks.
    full, _ = build_groups(caches([HALF, WINDOW]))
    assert (full.spec.block_size, full.block_bytes()) == (32, WINDOW.page_bytes)
    assert full.spec.admission_blocks(4096) == ceil_div(4096, 32)


@pytest.mark.parametrize(("short", "long", "sizes"), [(8, 11, [8, 11]), (8, 12, [8, 6, 6]), (3, 10, [3, 3, 3, 2, 2])])
def test_sizes_of_groups(short: int, long: int, sizes: list[int]) -> None:
    groups = build_groups(caches([FULL] * short + [WINDOW] * long))
    assert [len(group.pages) for group in groups] == sizes


def test_without_hybrid_groups() -> None:
    (group,) = build_groups(caches([FULL, WINDOW, CHUNK]), hybrid=False)
    assert group.block_bytes() == 3 * FULL.page_bytes
    with pytest.raises(UnsupportedModelError, match="hybrid groups"):
        build_groups(caches([FULL, STATE]), hybrid=False)


def test_admission_of_windows_chunks_and_states() -> None:
    assert WINDOW.admission_blocks(10**6, in_flight=16) == ceil_div(127 + 16, 16) + 1
    assert WINDOW.admission_blocks(64, in_flight=16) == 4 + 1  # the engine counts one more even then
    assert CHUNK.admission_blocks(10**6, in_flight=16) == ceil_div(256 + 16, 16)
    assert CHUNK.blocks(10**6) == 16
    assert STATE.admission_blocks(10**6) == 1
    assert FULL.admission_blocks(1000, dcp=4) == ceil_div(250, 16)
    for spec in (WINDOW, CHUNK):
        with pytest.raises(UnsupportedModelError):
            spec.admission_blocks(64, dcp=2)
