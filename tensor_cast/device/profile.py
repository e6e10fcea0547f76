"""One device: peak rates, memory, links, and how far real kernels stay behind them.

A device is one YAML file in ``configs/devices``; the file name is the device's name. Each number carries its source.
Rates are dense, per device; link bandwidths per device and direction; everything in SI units except memory (bytes).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Sourced(_Frozen):
    """A number with where it comes from. ``verified`` is false for general knowledge nobody looked up."""

    value: PositiveFloat
    source: str
    verified: bool = True


class OpClass(StrEnum):
    """Kernels that share an efficiency: they miss their roofline for the same reasons."""

    GEMM = "gemm"
    MOE = "moe"
    ATTENTION_PREFILL = "attention_prefill"
    ATTENTION_DECODE = "attention_decode"
    MLA_PREFILL = "mla_prefill"
    MLA_DECODE = "mla_decode"
    BATCHED_GEMM = "batched_gemm"
    POINTWISE = "pointwise"
    SAMPLING = "sampling"


class KernelFit(_Frozen):
    """``time = floor_s + max(flops / (peak * compute), bytes / (bandwidth * memory))``.

    Fitted by ``benchmarks/fit_op_points.py``; ``error`` is the held-out median absolute relative error, None where
    the numbers were taken over from a similar device (``source`` says which).
    """

    floor_s: NonNegative
    compute: Fraction
    memory: Fraction
    source: str
    error: float | None = None


class CollectiveFit(_Frozen):
    """``time = alpha_s + alpha_rank_s * (ranks - 1) + wire_bytes / (link bandwidth * efficiency)`` within one tier."""

    alpha_s: NonNegative
    alpha_rank_s: NonNegative = 0.0
    efficiency: Fraction
    source: str
    error: float | None = None


class Tier(_Frozen):
    """A level of the interconnect. Tiers are listed from the innermost out; a group crosses the first that holds it.

    Args:
        name: ``die``, ``node``, ``rack``, ``roce`` ...
        size: devices within one domain of this tier; None for the outermost, unbounded one.
        bandwidth: bytes per second, per device and direction.
        latency_s: of one hop, on top of the collective's own alpha.
        full_mesh_links: links a collective uses at once where a single pair has only one of them, else 1.
    """

    name: str
    size: PositiveInt | None
    bandwidth: Sourced
    latency_s: NonNegative
    full_mesh_links: PositiveInt = 1


class DeviceProfile(_Frozen):
    """Everything the performance and memory models ask of a device.

    ``peak_flops`` maps a compute dtype (``bfloat16``, ``float8_e4m3fn``, ``int8``, ``float4_e2m1fn`` ...) to FLOP/s.
    ``emulates`` maps a dtype without a rate of its own to the dtype its kernels compute in (weight-only paths);
    any other dtype is refused. ``kernels`` maps ``"<op class>"`` or ``"<op class>:<compute dtype>"`` to a fit, the more
    specific key first; ``collectives`` maps ``all_reduce | all_gather | reduce_scatter | all_to_all | p2p``.
    """

    name: str
    vendor: str
    description: str
    memory_bytes: Sourced
    usable_memory_bytes: Sourced
    memory_bandwidth: Sourced
    peak_flops: dict[str, Sourced]
    vector_flops: Sourced | None = None
    emulates: dict[str, str] = Field(default_factory=dict)
    tiers: tuple[Tier, ...]
    kernels: dict[str, KernelFit]
    collectives: dict[str, CollectiveFit]
    notes: tuple[str, ...] = ()
