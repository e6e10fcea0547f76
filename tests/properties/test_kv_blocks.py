"""No token of a cache is lost or held twice, and no block either."""

from __future__ import annotations

import numpy as np
import torch
from embedded import MODELS, SEMANTICS, cases, examples
from hypothesis import given
from hypothesis import strategies as st

from serving_cast.config import ParallelConfig as ServingConfig
from serving_cast.kv_cache_manager import KVCacheManager, block_table_shape, logical_block_size
from tensor_cast.dtypes import bits_of
from tensor_cast.engine.dcp import local_tokens, owner
from tensor_cast.engine.kv_cache import request_kv_bytes
from tensor_cast.ir.program import Layout
from tensor_cast.ir.record import Phase
from tensor_cast.model_catalog import load_model_config
from tensor_cast.model_config import AttentionKind
from tensor_cast.ops.kv_layout import local_length, slot_mapping


@st.composite
def placements(draw: st.DrawFn) -> tuple[int, int, int]:
    """dcp, interleave and block size that fit each other."""
    interleave = draw(st.sampled_from((1, 2, 4, 16)))
    return draw(st.integers(1, 16)), interleave, interleave * draw(st.integers(1, 8))


@given(placement=placements(), tokens=st.integers(0, 100_000))
@examples(300)
def test_ranks_share_the_tokens(placement: tuple[int, int, int], tokens: int) -> None:
    """Local tokens add up to the tokens; the fullest rank is the first, and has what attention reads."""
    dcp, interleave, _ = placement
    local = [local_tokens(tokens, rank, dcp=dcp, interleave=interleave) for rank in range(dcp)]
    assert sum(local) == tokens
    assert local == sorted(local, reverse=True)
    assert local[0] - local[-1] <= interleave
    reads = local_length(tokens, dcp, interleave)
    assert reads >= local[0]
    assert reads - local[0] < max(interleave, 1) or dcp == 1


@given(placement=placements(), length=st.integers(1, 700), batch=st.integers(1, 4), seed=st.integers(0, 99))
@examples(60)
def test_every_token_has_one_slot(placement: tuple[int, int, int], length: int, batch: int, seed: int) -> None:
    """Over the ranks each token is stored once, in a slot of its own, inside the blocks that its request was given."""
    dcp, interleave, block = placement
    blocks = -(-length // (block * dcp))
    assert (batch, blocks) == block_table_shape(
        num_decodes=0, num_prefills=batch, max_tokens=length, block_size=block, dcp_size=dcp
    )
    order = torch.randperm(batch * blocks, generator=torch.Generator().manual_seed(seed))
    table = order.view(batch, blocks)
    positions = torch.arange(length).expand(batch, -1)
    stored = torch.zeros(batch * length, dtype=torch.int64)
    for rank in range(dcp):
        slots = slot_mapping(positions, table, block_size=block, dcp=dcp, rank=rank, interleave=interleave)
        mine = slots >= 0
        stored += mine
        assert len(slots[mine].unique()) == int(mine.sum()), "two tokens in one slot"
        per_request = mine.view(batch, length)
        assert (per_request.sum(1) == local_tokens(length, rank, dcp=dcp, interleave=interleave)).all()
        owners = [owner(p, dcp=dcp, block_size=block, interleave=interleave) for p in range(length)]
        assert (per_request[0] == torch.tensor(owners).eq(rank)).all()
        used = (slots[mine] // block).unique()
        assert set(used.tolist()) <= set(range(batch * blocks))
        for request in range(batch):
            inside = slots.view(batch, length)[request][per_request[request]] // block
            assert set(inside.tolist()) <= set(table[request].tolist()), "a block of another request"
    assert (stored == 1).all()


@given(data=st.data(), case=cases(phase=Phase.DECODE), tokens=st.integers(1, 300_000))
@examples(120)
def test_blocks_hold_the_tokens_and_no_more_than_one_spare(
    data: st.DataObject, case: tuple[str, Layout], tokens: int
) -> None:
    """A request's blocks over the ranks hold its tokens, the last of them partly; bytes are whole blocks.

    What the model itself needs per token and rank comes from its heads.
    """
    name, layout = case
    model, parallel = load_model_config(name), layout.parallel
    dcp, tp = layout.dcp, parallel.tensor_parallel_size
    dtype = data.draw(st.sampled_from(("bfloat16", "float8_e4m3fn")))
    nbytes = request_kv_bytes(
        model, parallel, tokens=tokens, block_size=128, kv_dtype=dtype, dcp_semantics=layout.dcp_semantics
    )
    if model.attention is AttentionKind.GQA:
        heads = max(1, model.num_key_value_heads // tp)
        if layout.dcp_semantics == "rfc" and dcp > 1:
            heads = model.num_key_value_heads * dcp // tp
        per_token = 2 * heads * model.head_dim * bits_of(dtype) // 8
    elif dtype == "bfloat16":
        per_token = (model.kv_lora_rank + model.qk_rope_head_dim) * 2
    else:
        return  # engines store 8-bit latents in formats of their own
    full = sum(window is None for window in model.layer_windows)
    logical = logical_block_size(128, dcp)
    blocks = -(-tokens // logical)
    assert blocks * logical - tokens < logical
    least, most = full * per_token * 128 * blocks, model.num_hidden_layers * per_token * 128 * blocks
    assert least <= nbytes <= most
    if full == model.num_hidden_layers:
        assert nbytes == least
    if model.attention is AttentionKind.GQA and tp <= model.num_key_value_heads and dcp == 1:
        # Nothing is copied: the ranks together hold the cache of one rank alone.
        alone = request_kv_bytes(
            model,
            type(parallel)(),
            tokens=tokens,
            block_size=128,
            kv_dtype=dtype,
            dcp_semantics=layout.dcp_semantics,
        )
        assert nbytes * tp == alone


@given(
    name=st.sampled_from(MODELS),
    semantics=st.sampled_from(SEMANTICS),
    pool=st.integers(1, 2**37),
    tokens=st.integers(1, 200_000),
)
@examples(60)
def test_a_pool_is_never_overbooked(name: str, semantics: str, pool: int, tokens: int) -> None:
    """Requests that are said to fit do fit beside the null block, and one more would not."""
    model = load_model_config(name)
    manager = KVCacheManager(model, ServingConfig(tp_size=1), 128, "bfloat16", semantics)
    fits = manager.max_requests(pool, tokens)
    free = pool - manager.block_bytes
    assert manager.pool_bytes(fits, tokens) <= max(free, 0)
    assert manager.pool_bytes(fits + 1, tokens) > free
    # Groups pad: a request takes no less of the pool than its caches hold.
    assert manager.pool_bytes(1, tokens) >= manager.request_bytes(tokens)
    grown = np.array([manager.request_bytes(t) for t in range(tokens, tokens + 300, 37)])
    assert (np.diff(grown) >= 0).all()
