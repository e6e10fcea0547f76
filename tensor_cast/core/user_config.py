"""What a user asks of one model on one layout: the options of ``text_generate`` and ``trace`` as one value."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt

from tensor_cast.core.layout_options import LayoutOptions, NonNegativeInt
from tensor_cast.device.catalog import load_device
from tensor_cast.engine.catalog import default_engine, load_engine
from tensor_cast.engine.kv_cache import indexer_layers
from tensor_cast.engine.profile import EngineProfile
from tensor_cast.errors import ConfigError
from tensor_cast.ir.record import Phase
from tensor_cast.model_config import ModelConfig, ParallelConfig
from tensor_cast.parallel import check
from tensor_cast.pipeline_partition import Partition, default_partition, parse_partition, refuse_unsafe
from tensor_cast.quant import QuantConfig


class UserInputConfig(LayoutOptions):
    """One model, one layout, one step.

    Args:
        num_queries: requests of one data-parallel rank (symbol B).
        query_length: tokens of each request in this step (symbol Q). None: 1 + num_mtp_tokens in decode, else
            ``context_length``.
        context_length: tokens of each request in the cache as attention reads it, this step's tokens included (symbol
            S). 0, or no more than the query, means a fresh prompt: nothing was cached before this step.
        pp_extra_batches: batches in flight beyond one for each stage; None takes the engine's number.
        quantize_attention_action: a scheme; None takes the config's own quantisation.
    """

    pp_extra_batches: NonNegativeInt | None = None
    phase: Phase = Phase.DECODE
    num_queries: PositiveInt = 1
    query_length: PositiveInt | None = None
    context_length: NonNegativeInt = 0
    quantize_attention_action: str | None = None
    reserved_memory_gb: Annotated[float, Field(ge=0)] = 0.0
    fusion: bool = True
    strict: bool = False

    def get_parallel_config(self) -> ParallelConfig:
        """The layout. Prefill runs with dcp = 1, whatever was asked for decode."""
        return ParallelConfig(
            tensor_parallel_size=self.tp_size,
            pipeline_parallel_size=self.pp_size,
            data_parallel_size=self.dp_size,
            expert_parallel_size=self.ep_size,
            moe_data_parallel_size=self.moe_dp_size,
            decode_context_parallel_size=1 if self.phase is Phase.PREFILL else self.dcp_size,
            cp_kv_cache_interleave_size=self.cp_kv_cache_interleave_size,
        )

    def get_engine(self) -> EngineProfile:
        """The engine asked for, else the default of the device's vendor."""
        device = None if self.device is None else load_device(self.device)
        engine = load_engine(self.engine or default_engine(device))
        if self.pp_extra_batches is None:
            return engine
        return engine.model_copy(update={"pp_extra_batches": self.pp_extra_batches})

    def get_dcp_semantics(self) -> str:
        """The semantics asked for, else the engine's."""
        return self.dcp_semantics or self.get_engine().dcp_semantics

    def get_block_size(self, model: ModelConfig) -> int:
        """Tokens in a physical KV block: as asked, else the engine's choice for this kind of attention."""
        return self.block_size or self.get_engine().block_size_for(model.attention)

    def get_partition(self, model: ModelConfig) -> Partition:
        """Layers of each stage.

        Raises:
            ConfigError: a partition without stages, or one that is no list of integers.
            LegalityError: it does not fit the model, or leaves layers without the top-k indices that they reuse.
        """
        layers, asked = model.num_hidden_layers, self.pp_layer_partition
        if asked is not None and self.pp_size == 1:
            raise ConfigError("--pp-layer-partition needs stages to divide the layers over; add --pp-size 2 or more")
        partition = (
            default_partition(layers, self.pp_size) if asked is None else parse_partition(asked, layers, self.pp_size)
        )
        refuse_unsafe(partition, indexer_layers(model), self.dsa_split)
        return partition

    def get_query_length(self) -> int:
        """Tokens of each request in this step."""
        if self.query_length is not None:
            return self.query_length
        if self.phase is Phase.DECODE:
            return 1 + self.num_mtp_tokens
        if self.context_length == 0:
            raise ConfigError("a prefill step needs a length: give --query-length (or --context-length) of at least 1")
        return self.context_length

    def get_sizes(self) -> dict[str, int]:
        """B, Q and S. Raises :class:`ConfigError` when the cache would hold less than the query adds to it."""
        query = self.get_query_length()
        context = self.context_length or query
        if context < query:
            raise ConfigError(
                f"context length {context} is shorter than query length {query}: it counts the tokens in the cache "
                f"including this step's; give at least {query}, or 0 for a fresh prompt"
            )
        return {"B": self.num_queries, "Q": query, "S": context}

    def check(self, model: ModelConfig, quant: QuantConfig) -> ParallelConfig:
        """The layout, if it breaks no rule. Raises :class:`LegalityError` for the first rule it breaks."""
        parallel = self.get_parallel_config()
        check(
            model,
            parallel,
            dcp_semantics=self.get_dcp_semantics(),
            block_size=self.get_block_size(model),
            quant_block=quant.block,
            num_mtp_tokens=self.num_mtp_tokens,
            phase=self.phase,
        )
        return parallel
