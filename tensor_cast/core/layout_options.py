"""The model and layout that a command is asked about: options of ``capacity``, ``text_generate`` and ``trace``."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from tensor_cast.errors import ConfigError
from tensor_cast.pipeline_partition import DsaSplit

__all__ = ["LayoutOptions", "NonNegativeInt"]

NonNegativeInt = Annotated[int, Field(ge=0)]


class LayoutOptions(BaseModel):
    """One model on one layout.

    Args:
        model: hub id of an embedded config, or a local folder.
        device: name of a device; None leaves out everything that depends on one.
        engine, dcp_semantics, block_size: None takes the default of the device's vendor, or the engine's.
        pp_layer_partition: layers of each pipeline stage, ``"41,37"``; None takes the engine's own rule.
        dsa_split: how to go on where a stage lacks the top-k indices that its first layers reuse; None refuses.
        quantize_linear_action: a scheme; None takes the config's own quantisation.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str
    device: str | None = None
    engine: str | None = None
    dcp_semantics: str | None = None
    tp_size: PositiveInt = 1
    pp_size: PositiveInt = 1
    pp_layer_partition: str | None = None
    dsa_split: DsaSplit | None = None
    dp_size: PositiveInt = 1
    ep_size: PositiveInt = 1
    moe_dp_size: PositiveInt = 1
    dcp_size: PositiveInt = 1
    cp_kv_cache_interleave_size: PositiveInt = 1
    block_size: PositiveInt | None = None
    num_mtp_tokens: NonNegativeInt = 0
    quantize_linear_action: str | None = None

    @classmethod
    def create(cls, **values: object) -> Self:
        """Build from options. Raises :class:`ConfigError` with one line for each value that cannot be used."""
        try:
            return cls(**values)
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, e['loc']))}: {e['msg'][0].lower()}{e['msg'][1:]}, found {e['input']!r}"
                for e in error.errors()
            )
            raise ConfigError(problems) from None
