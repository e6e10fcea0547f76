"""A search as it is asked, with the things that its names stand for: model, device, engine, quantisation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property

from serving_cast.config import Mode, OptimizerConfig, Workload
from tensor_cast.core.start_up import StartUp
from tensor_cast.device.catalog import load_device
from tensor_cast.device.profile import DeviceProfile
from tensor_cast.engine.catalog import default_engine, load_engine
from tensor_cast.engine.dcp import get_semantics
from tensor_cast.engine.kv_formats import resolve_kv_format
from tensor_cast.engine.limits import step_limits
from tensor_cast.engine.profile import EngineProfile
from tensor_cast.errors import ConfigError, LegalityError
from tensor_cast.hf_config import no_drafts
from tensor_cast.model_catalog import load_model_config
from tensor_cast.model_config import ModelConfig
from tensor_cast.pipeline_partition import AUTO, parse_partition
from tensor_cast.quant import QuantConfig

__all__ = ["Setting", "make_setting"]


@dataclass(frozen=True)
class Setting:
    """Everything about a search that does not depend on the layout."""

    config: OptimizerConfig
    model: ModelConfig
    device: DeviceProfile
    engine: EngineProfile
    quant: QuantConfig
    dcp_semantics: str
    block_size: int
    interleave: int
    budget: int
    max_num_seqs: int

    @property
    def workload(self) -> Workload:
        """The requests."""
        return self.config.workload

    @property
    def labels(self) -> tuple[str, str, str]:
        """Device, engine and DCP semantics, as rows show them."""
        return self.device.name, self.engine.name, self.dcp_semantics

    @cached_property
    def start_up(self) -> StartUp:
        """What the engine is started with; the longest request is the workload's unless the user says otherwise.

        Raises:
            ConfigError: the KV dtype is not one for the model.
        """
        w, c = self.workload, self.config
        return StartUp(
            model=self.model,
            device=self.device,
            engine=self.engine,
            quant=self.quant,
            form=resolve_kv_format(self.model, self.quant.kv_dtype),
            dcp_semantics=self.dcp_semantics,
            block_size=self.block_size,
            max_model_len=c.max_model_len or w.total_tokens + w.num_mtp_tokens,
            max_num_seqs=self.max_num_seqs,
            max_batched_tokens=self.budget,
            utilization=c.gpu_memory_utilization or self.engine.gpu_memory_utilization,
            num_mtp_tokens=w.num_mtp_tokens,
        )

    @property
    def available_bytes(self) -> float:
        """What the engine may use of a device's memory."""
        return float(self.start_up.budget)


def make_setting(config: OptimizerConfig, device_name: str) -> Setting:
    """Load what the names in ``config`` stand for, with defaults from the engine.

    Raises:
        ConfigError: an unknown name or a value that cannot be used.
        LegalityError: a partition that fits none of the pipeline sizes.
        UnsupportedModelError: the model has a part that cannot be modelled yet.
    """
    device = load_device(device_name)
    engine = load_engine(config.engine or default_engine(device))
    if config.pp_extra_batches is not None:
        engine = engine.model_copy(update={"pp_extra_batches": config.pp_extra_batches})
    model = load_model_config(config.model)
    semantics = config.dcp_semantics or engine.dcp_semantics
    get_semantics(semantics)  # an unknown name is an error here, not in the first layout
    if config.workload.num_mtp_tokens and not model.num_nextn_predict_layers:
        has = no_drafts(json.loads(model.hf_config))
        raise ConfigError(f"--num-mtp-tokens needs draft (MTP) weights; {model.model_id} {has}; leave the option out")
    _check_partition(config, model)
    low = config.space.batch_range[0] if config.space.batch_range else 1
    limits = step_limits(engine, device)
    if limits.max_num_seqs and low > limits.max_num_seqs:
        raise ConfigError(f"--batch-range starts at {low}, {engine.name} runs at most {limits.max_num_seqs} requests")
    block = config.block_size or engine.block_size_for(model.attention)
    # Moving KV between instances needs whole blocks on one rank; alone, vLLM's default interleaves single tokens.
    interleave = config.cp_kv_cache_interleave_size or (1 if config.mode is Mode.AGGREGATED else block)
    return Setting(
        config=config,
        model=model,
        device=device,
        engine=engine,
        quant=QuantConfig.resolve(
            model,
            config.quantize_linear_action,
            config.quantize_attention_action,
            dcp_semantics=semantics,
            expert_kernel=engine.expert_kernel(device.name),
        ),
        dcp_semantics=semantics,
        block_size=block,
        interleave=interleave,
        budget=config.max_batched_tokens or limits.max_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
    )


def _check_partition(config: OptimizerConfig, model: ModelConfig) -> None:
    """Refuse a partition that fits none of the pipeline sizes: a slip of the user's, not a finding of the search."""
    asked = config.pp_layer_partition
    if asked in (None, AUTO):
        return
    misfits: list[LegalityError] = []
    for stages in config.space.pp:
        try:
            parse_partition(asked, model.num_hidden_layers, stages)
        except LegalityError as error:
            misfits.append(error)
        else:
            return
    raise next((error for error in misfits if error.rule != "pp.partition_count"), misfits[-1])
