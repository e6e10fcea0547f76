"""What a search is asked: layout, workload, limits and search space, as frozen values that check themselves.

``ParallelConfig`` is the serving view of a layout (names of the RFC); :meth:`ParallelConfig.to_tensor_cast` gives the
one that tracing and pricing use.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from tensor_cast.errors import ConfigError
from tensor_cast.model_config import ParallelConfig as TensorParallelConfig
from tensor_cast.pipeline_partition import DsaSplit, parse_dsa_split

__all__ = [
    "DEFAULT_MTP_ACCEPTANCE",
    "Limits",
    "Mode",
    "OptimizerConfig",
    "ParallelConfig",
    "SearchSpace",
    "Workload",
]

#: Acceptance of each draft token given all before it, where the user states none. The DeepSeek-V3 technical report
#: (arXiv 2412.19437, section 5.4.3) gives 85 to 90 % for the one draft token of its MTP module.
DEFAULT_MTP_ACCEPTANCE = 0.85


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of the parallel axes of one instance.

    Args:
        world_size: devices of the instance, tp * pp * dp; 0 fills it in. DCP reuses the TP ranks and adds none.
        tp_size, pp_size, dp_size, ep_size, moe_dp_size: ways of each axis.
        dcp_size: ways in which the KV cache of a sequence is split within a TP group during decode.
        cp_kv_cache_interleave_size: consecutive tokens of a sequence that one DCP rank holds.
        pp_layer_partition: layers of each pipeline stage; empty where there is one stage or no choice was made.

    Raises:
        ConfigError: a size below 1, or a ``world_size`` that is not the product.
    """

    world_size: int = 0
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    moe_dp_size: int = 1
    dcp_size: int = 1
    cp_kv_cache_interleave_size: int = 1
    pp_layer_partition: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name not in ("world_size", "pp_layer_partition"):
                _require_count(name, value)
        devices = self.tp_size * self.pp_size * self.dp_size
        if self.world_size not in (0, devices):
            raise ConfigError(
                f"world_size {self.world_size} is not tp*pp*dp = {devices}; leave it out, DCP and EP add no devices"
            )
        object.__setattr__(self, "world_size", devices)

    @property
    def moe_tp_size(self) -> int:
        """Ways each expert's intermediate size is split: moe_tp * moe_dp * ep = tp * dp."""
        return self.tp_size * self.dp_size // (self.ep_size * self.moe_dp_size)

    def to_tensor_cast(self) -> TensorParallelConfig:
        """The same layout in the words of tracing and pricing."""
        return TensorParallelConfig(
            tensor_parallel_size=self.tp_size,
            pipeline_parallel_size=self.pp_size,
            data_parallel_size=self.dp_size,
            expert_parallel_size=self.ep_size,
            moe_data_parallel_size=self.moe_dp_size,
            decode_context_parallel_size=self.dcp_size,
            cp_kv_cache_interleave_size=self.cp_kv_cache_interleave_size,
        )

    def for_prefill(self) -> ParallelConfig:
        """The layout of the prefill phase, whose KV is not split: dcp = 1."""
        return replace(self, dcp_size=1)

    def axes(self) -> dict[str, int]:
        """Size of every axis by its short name, as rows and rejections print it."""
        return {
            "tp": self.tp_size,
            "pp": self.pp_size,
            "dp": self.dp_size,
            "ep": self.ep_size,
            "moe_tp": self.moe_tp_size,
            "moe_dp": self.moe_dp_size,
            "dcp": self.dcp_size,
        }


@dataclass(frozen=True)
class Workload:
    """The requests that arrive: all alike, ``input_length`` prompt tokens and ``output_length`` generated ones.

    Args:
        prefix_cache_hit_rate: share of the prompt whose KV is already in the cache. It needs no prefill work, but is
            attended to and occupies the cache like the rest.
        num_mtp_tokens: draft tokens verified in each decode step (k).
        mtp_acceptance_rates: chance that draft i is accepted given that all before it were. Missing positions repeat
            the last rate; none at all means :data:`DEFAULT_MTP_ACCEPTANCE`.
    """

    input_length: int
    output_length: int
    prefix_cache_hit_rate: float = 0.0
    num_mtp_tokens: int = 0
    mtp_acceptance_rates: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _require_count("input length", self.input_length)
        _require_count("output length", self.output_length)
        _require_count("number of MTP tokens", self.num_mtp_tokens, least=0)
        _require_share("prefix cache hit rate", self.prefix_cache_hit_rate)
        for rate in self.mtp_acceptance_rates:
            _require_share("MTP acceptance rate", rate)
        rates, tokens = self.mtp_acceptance_rates, self.num_mtp_tokens
        if len(rates) > tokens:
            raise ConfigError(
                f"{len(rates)} MTP acceptance rates for {tokens} draft tokens; give at most one rate for each draft "
                f"token, or raise --num-mtp-tokens"
            )
        filler = rates[-1] if rates else DEFAULT_MTP_ACCEPTANCE
        object.__setattr__(self, "mtp_acceptance_rates", rates + (filler,) * (tokens - len(rates)))

    @property
    def query_length(self) -> int:
        """Query tokens of a decode step and request: 1 + k."""
        return 1 + self.num_mtp_tokens

    @property
    def tokens_per_step(self) -> float:
        """Expected tokens that a request gains in a decode step: 1 + a1 + a1*a2 + ..."""
        total = chance = 1.0
        for rate in self.mtp_acceptance_rates:
            chance *= rate
            total += chance
        return total

    @property
    def new_input_tokens(self) -> float:
        """Prompt tokens that need prefill. Engines always compute the last one, for its logits."""
        return max(1.0, self.input_length * (1.0 - self.prefix_cache_hit_rate))

    @property
    def cached_input_tokens(self) -> float:
        """Prompt tokens found in the cache."""
        return self.input_length - self.new_input_tokens

    @property
    def mean_decode_context(self) -> float:
        """Mean tokens that a decode step's attention reads per request (symbol S).

        Generating token i + 1 reads the prompt and i generated tokens, its own query included, i = 1 .. OSL - 1, hence
        ISL + OSL/2; the k draft tokens of the step are in the cache as well.
        """
        return self.input_length + self.output_length / 2 + self.num_mtp_tokens

    @property
    def total_tokens(self) -> int:
        """Tokens of a request when it ends."""
        return self.input_length + self.output_length


@dataclass(frozen=True)
class Limits:
    """Latency limits in milliseconds; None for none."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("TTFT limit", self.ttft_ms), ("TPOT limit", self.tpot_ms)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be a positive number of milliseconds, found {value:g}")


@dataclass(frozen=True)
class SearchSpace:
    """Sizes to try for each axis; None takes every divisor, pipelines are looked at only where they are asked for.

    ``batch_range``, inclusive, is of decodes of one rank.
    """

    tp: tuple[int, ...] | None = None
    pp: tuple[int, ...] = (1,)
    dp: tuple[int, ...] | None = None
    ep: tuple[int, ...] | None = None
    moe_dp: tuple[int, ...] | None = None
    dcp: tuple[int, ...] | None = None
    batch_range: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "ep", "moe_dp", "dcp"):
            sizes = getattr(self, name)
            if sizes is None:
                continue
            if not sizes:
                raise ConfigError(f"--{name.replace('_', '-')}-sizes needs at least one size")
            for size in sizes:
                _require_count(f"--{name.replace('_', '-')}-sizes", size)
        if self.batch_range is not None:
            low, high = self.batch_range
            _require_count("--batch-range", low)
            if low > high:
                raise ConfigError(f"--batch-range {low} {high} is reversed; give the smaller batch first")


class Mode(StrEnum):
    """How prefill and decode share the devices."""

    AGGREGATED = "aggregated"
    DISAGGREGATED = "disaggregated"
    PD_RATIO = "pd_ratio"


@dataclass(frozen=True)
class OptimizerConfig:
    """One search as asked. None leaves a choice to the engine or to the model's own config.

    Args:
        model: hub id of an embedded config, or a local folder.
        devices: device names; each is searched on its own with ``num_devices`` of it.
        limits: one scenario for each entry and device.
        max_batched_tokens: token budget of a step.
        max_concurrency: most requests in flight over all devices: of all ranks, replicas and batches of a pipeline;
            None is no bound. Prefill and decode instances of a disaggregated search each keep it on their own.
        max_model_len: tokens of the longest request that the engine is started for, which sizes buffers of its kernels;
            None is the workload's with its draft tokens.
        gpu_memory_utilization: share of usable memory that the engine takes.
        pp_layer_partition: layers of each pipeline stage as ``"41,37"``, or ``"auto"`` for the best of every size; None
            is the engine's own rule.
        pp_extra_batches: batches that a pipeline keeps in flight beyond one for each stage; None is the engine's own.
        dsa_split: how to go on where a stage would read top-k indices that it never wrote; see
            :class:`tensor_cast.pipeline_partition.DsaSplit`. None refuses such partitions.
        prefill_devices_per_instance, decode_devices_per_instance: of the PD-ratio mode; None tries every size.
        reserved_memory_gb: GiB per device kept free.
        jobs: processes for several devices; no effect on the result.
        top: candidates that the table shows; JSON and CSV hold all.
    """

    model: str
    devices: tuple[str, ...]
    num_devices: int
    workload: Workload
    limits: tuple[Limits, ...] = (Limits(),)
    space: SearchSpace = field(default_factory=SearchSpace)
    mode: Mode = Mode.AGGREGATED
    prefill_devices_per_instance: int | None = None
    decode_devices_per_instance: int | None = None
    engine: str | None = None
    dcp_semantics: str | None = None
    block_size: int | None = None
    cp_kv_cache_interleave_size: int | None = None
    quantize_linear_action: str | None = None
    quantize_attention_action: str | None = None
    reserved_memory_gb: float = 0.0
    max_batched_tokens: int | None = None
    max_concurrency: int | None = None
    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    pp_layer_partition: str | None = None
    pp_extra_batches: int | None = None
    dsa_split: DsaSplit | None = None
    fusion: bool = True
    strict: bool = False
    use_cache: bool = True
    jobs: int = 1
    top: int = 10

    def __post_init__(self) -> None:
        _require_count("--num-devices", self.num_devices)
        _require_count("--jobs", self.jobs)
        _require_count("--top", self.top)
        for name in (
            "block_size",
            "cp_kv_cache_interleave_size",
            "max_batched_tokens",
            "max_concurrency",
            "max_model_len",
            "prefill_devices_per_instance",
            "decode_devices_per_instance",
        ):
            value = getattr(self, name)
            if value is not None:
                _require_count(f"--{name.replace('_', '-')}", value)
        if self.max_model_len is not None and self.max_model_len < self.workload.total_tokens:
            raise ConfigError(
                f"--max-model-len must hold a request of {self.workload.total_tokens} tokens (input and output), found "
                f"{self.max_model_len}"
            )
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"--gpu-memory-utilization must be above 0 and at most 1, found {self.gpu_memory_utilization:g}"
            )
        if not (math.isfinite(self.reserved_memory_gb) and self.reserved_memory_gb >= 0):
            raise ConfigError(f"--reserved-memory-gb must be 0 or more, found {self.reserved_memory_gb:g}")
        if self.pp_layer_partition is not None and max(self.space.pp) == 1:
            raise ConfigError(
                f"--pp-layer-partition {self.pp_layer_partition} needs stages to divide the layers over; add "
                "--pp-sizes 2 or more (1,2 to compare with no pipeline)"
            )
        if self.pp_extra_batches is not None:
            _require_count("--pp-extra-batches", self.pp_extra_batches, least=0)
        if self.dsa_split is not None:
            object.__setattr__(self, "dsa_split", parse_dsa_split(self.dsa_split))
        if not self.devices or not self.limits:
            raise ConfigError("a search needs at least one device and one set of limits")
        if self.mode is Mode.PD_RATIO and self.max_concurrency is not None:
            raise ConfigError(
                "--max-concurrency does not go with --enable-optimize-prefill-decode-ratio, which looks for the "
                "numbers of instances; bound the batch of an instance with --batch-range"
            )
        wanted = (self.prefill_devices_per_instance or 1) + (self.decode_devices_per_instance or 1)
        if self.mode is Mode.PD_RATIO and wanted > self.num_devices:
            raise ConfigError(
                f"one prefill and one decode instance need {wanted} devices, --num-devices is {self.num_devices}"
            )

    def echo(self) -> dict[str, Any]:
        """Every input under the name of its option, for the output; limits and device are those of one scenario."""
        values = asdict(self)
        del values["limits"], values["devices"]
        space = values.pop("space")
        sizes = {f"{axis}_sizes": space[axis] for axis in ("tp", "pp", "dp", "ep", "moe_dp", "dcp")}
        workload: dict[str, Any] = values.pop("workload")
        return workload | values | sizes | {"batch_range": space["batch_range"], "mode": self.mode.value}


def _require_count(name: str, value: object, *, least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be an integer of at least {least}, found {value}")


def _require_share(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:  # False for NaN as well
        raise ConfigError(f"{name} must lie between 0 and 1, found {value:g}")
