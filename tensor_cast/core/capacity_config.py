"""What a user asks of ``msmodeling capacity``, as one value."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from tensor_cast.errors import ConfigError
from tensor_cast.pipeline_partition import DsaSplit

NonNegativeInt = Annotated[int, Field(ge=0)]


class CapacityConfig(BaseModel):
    """One model on one kind of device, in one layout, with one or many pipeline partitions.

    Args:
        model: hub id of an embedded config, or a local folder.
        device: name of a device.
        pp_layer_partition: ``41,37``, ``auto`` (the split with most KV blocks) or ``all`` (every split); None takes
            the engine's own rule.
        dsa_split: how to go on where layers would reuse top-k indices across a stage boundary; None refuses.
        kv_cache_dtype: a format of :mod:`tensor_cast.engine.kv_formats`, or ``auto`` for the model's dtype.
        gpu_memory_utilization, block_size, max_num_batched_tokens, max_num_seqs: None takes the engine's default.
        max_model_len: tokens of the longest request; None takes the model's positions.
        kv_memory_gib: KV memory of a rank of each stage (or one for all) instead of an estimate.
        request_length: tokens of a request whose resident number is wanted.
        hybrid_kv_cache: whether windowed layers free blocks behind their window.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str
    device: str
    engine: str | None = None
    dcp_semantics: str | None = None
    tp_size: PositiveInt = 1
    pp_size: PositiveInt = 1
    dp_size: PositiveInt = 1
    ep_size: PositiveInt = 1
    dcp_size: PositiveInt = 1
    num_mtp_tokens: NonNegativeInt = 0
    pp_layer_partition: str | None = None
    dsa_split: DsaSplit | None = None
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    max_model_len: PositiveInt | None = None
    block_size: PositiveInt | None = None
    max_num_batched_tokens: PositiveInt | None = None
    max_num_seqs: PositiveInt | None = None
    quantize_linear_action: str | None = None
    kv_memory_gib: tuple[Annotated[float, Field(ge=0)], ...] | None = None
    request_length: PositiveInt | None = None
    hybrid_kv_cache: bool = True

    @classmethod
    def create(cls, **values: object) -> CapacityConfig:
        """Build from options. Raises :class:`ConfigError` with one line for each value that cannot be used."""
        try:
            return cls(**values)
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, e['loc']))}: {e['msg'][0].lower()}{e['msg'][1:]}, found {e['input']!r}"
                for e in error.errors()
            )
            raise ConfigError(problems) from None
