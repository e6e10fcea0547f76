"""What a user asks of ``msmodeling capacity``, as one value."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt

from tensor_cast.core.layout_options import LayoutOptions


class CapacityConfig(LayoutOptions):
    """One model on one kind of device, in one layout, with one or many pipeline partitions.

    Args:
        pp_layer_partition: ``41,37``, ``auto`` (the split with most KV blocks) or ``all`` (every split); None takes
            the engine's own rule.
        kv_cache_dtype: a format of :mod:`tensor_cast.engine.kv_formats`, or ``auto`` for the model's dtype.
        gpu_memory_utilization, max_num_batched_tokens, max_num_seqs: None takes the engine's default.
        max_model_len: tokens of the longest request; None takes the model's positions.
        kv_memory_gib: KV memory of a rank of each stage (or one for all) instead of an estimate.
        request_length: tokens of a request whose resident number is wanted.
        hybrid_kv_cache: whether windowed layers free blocks behind their window.
    """

    device: str  # the memory is one's
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    max_model_len: PositiveInt | None = None
    max_num_batched_tokens: PositiveInt | None = None
    max_num_seqs: PositiveInt | None = None
    kv_memory_gib: tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...] | None = None
    request_length: PositiveInt | None = None
    hybrid_kv_cache: bool = True
