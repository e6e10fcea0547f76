"""One device: peak rates, memory, links, and how far real kernels stay behind them.

A device is one YAML file in ``configs/devices``; the file name is the device's name in lower case. Each number carries
its source. Rates are dense (no 2:4 sparsity) and per device; link bandwidths per device and direction. Everything is
held in bytes, bytes per second and FLOP per second; a file may write ``80 GiB``, ``1.6 TiB/s`` or ``312 TFLOP/s`` as
its source does, and the one conversion to plain numbers happens here, at load.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    model_validator,
)

from tensor_cast.dtypes import BITS
from tensor_cast.errors import ConfigError

NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]

_PREFIXES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BYTES = {f"{p}B": f for p, f in _PREFIXES.items()} | {f"{p}iB": 1024**power for power, p in enumerate("KMGT", start=1)}
_UNITS: dict[str, dict[str, int]] = {
    "a memory size": _BYTES,
    "a bandwidth": {f"{unit}/s": factor for unit, factor in _BYTES.items()},
    "a compute rate": {f"{p}{unit}": factor for p, factor in _PREFIXES.items() if p for unit in ("FLOP/s", "OP/s")},
}
_SUCH_AS = {"a memory size": "80 GiB", "a bandwidth": "3.35 TB/s", "a compute rate": "989 TFLOP/s"}
_QUANTITY = re.compile(r"\s*([0-9][0-9_.]*(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]+)\s*")


def _number(text: str, what: str) -> float:
    match = _QUANTITY.fullmatch(text)
    units = _UNITS[what]
    if match is None or match[2] not in units:
        raise ValueError(
            f"{what} is a number above 0 with one of the units {', '.join(units)}, such as {_SUCH_AS[what]}"
        )
    return float(match[1]) * units[match[2]]


#: Context of a validation whose values come from a file. There a bare number would be bytes: 4 for 4 TB/s is off by
#: twelve digits, and passes for a slow device. Between programs values are in plain units.
FROM_FILE = {"from": "file"}


def _quantity(what: str) -> Callable[[Any, ValidationInfo], Any]:
    """A validator that turns ``{"value": "80 GiB", ...}`` into plain units."""

    def convert(raw: Any, info: ValidationInfo) -> Any:
        if not isinstance(raw, dict) or "value" not in raw:
            return raw
        value = raw["value"]
        if isinstance(value, str):
            return {**raw, "value": _number(value, what)}
        return {**raw, "value": _number(f"{value} without a unit", what)} if info.context is FROM_FILE else raw

    return convert


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Sourced(_Frozen):
    """A number with where it comes from. ``verified`` is false for general knowledge nobody looked up."""

    value: PositiveFloat
    source: Annotated[str, Field(min_length=1)]
    verified: bool = True


MemorySize = Annotated[Sourced, BeforeValidator(_quantity("a memory size"))]
Bandwidth = Annotated[Sourced, BeforeValidator(_quantity("a bandwidth"))]
ComputeRate = Annotated[Sourced, BeforeValidator(_quantity("a compute rate"))]


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


#: Kernels of one compute dtype that differ enough to have a fit of their own: fp8 with a scale per block.
KERNEL_FAMILIES = ("fp8_block",)

#: Collectives that a device has a fit for.
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")


class KernelFit(_Frozen):
    """Seconds of a kernel, n being the independent tiles (of the memory leg: streams) that its work splits into.

    ``floor_s + max(flops / (peak * compute) * (1 + compute_tiles / n),
    bytes / (bandwidth * memory) * (1 + memory_tiles / n))``. ``compute_tiles`` and ``memory_tiles`` say how many tiles
    keep half of the device busy: a kernel with few of them leaves cores idle; 0 where measurements do not ask for the
    term. Fitted by ``benchmarks/fit_op_points.py``; ``error`` is the held-out median absolute relative error, None
    where the numbers were taken over from a similar device (``source`` says which).
    """

    floor_s: NonNegative
    compute: Fraction
    memory: Fraction
    compute_tiles: NonNegative = 0.0
    memory_tiles: NonNegative = 0.0
    source: str
    error: float | None = None


class CollectiveFit(_Frozen):
    """``time = alpha_s + alpha_rank_s * (ranks - 1) + wire_bytes / (link bandwidth * efficiency)`` within one tier.

    A group that spans tiers runs tier by tier, or with ``flat`` as one ring over all ranks at the speed of the
    outermost tier that it crosses. ``large`` is a second way to do the same, with a later start and more of the
    bandwidth; the faster one is taken for each message.
    """

    alpha_s: NonNegative
    alpha_rank_s: NonNegative = 0.0
    efficiency: Fraction
    flat: bool = False
    source: str
    error: float | None = None
    large: CollectiveFit | None = None


class Tier(_Frozen):
    """A level of the interconnect. Tiers are listed from the innermost out; a group crosses the first that holds it.

    Args:
        name: ``die``, ``node``, ``rack``, ``roce`` ...
        size: devices within one domain of this tier; None for the outermost, unbounded one.
        bandwidth: bytes per second, per device and direction, over all of the device's links of this tier.
        latency_s: of one hop, on top of the collective's own alpha.
        full_mesh_links: point-to-point links that make up ``bandwidth``, one to each peer of a full mesh; 1 behind a
            switch. A single pair of a full mesh has one of them only.
        source: where size and latency come from.
    """

    name: str
    size: Annotated[int, Field(ge=2)] | None
    bandwidth: Bandwidth
    latency_s: NonNegative
    full_mesh_links: PositiveInt = 1
    source: str = ""

    def bandwidth_among(self, ranks: int) -> float:
        """Bytes per second and direction that one device can use in a group of ``ranks`` devices of one domain.

        Behind a switch that is the whole bandwidth. In a full mesh only the links to the other members count.
        """
        usable = min(max(ranks - 1, 1), self.full_mesh_links)
        return self.bandwidth.value * usable / self.full_mesh_links


class DeviceProfile(_Frozen):
    """Everything the performance and memory models ask of a device.

    ``peak_flops`` maps a compute dtype (``bfloat16``, ``float8_e4m3fn``, ``int8``, ``float4_e2m1fn`` ...) to FLOP/s.
    ``emulates`` maps a dtype without a rate of its own to the dtype its kernels compute in (weight-only paths);
    any other dtype is refused. ``kernels`` maps ``"<op class>"``, ``"<op class>:<compute dtype>"`` or ``"<op
    class>:<kernel family>"`` to a fit, the more specific key first; ``collectives`` maps each of
    :data:`COLLECTIVES` to one.

    A file may leave out fits that it takes over from another device, see :mod:`tensor_cast.device.catalog`.

    ``memory_bytes`` is what the label says, ``usable_memory_bytes`` what an engine finds on an idle device.
    """

    name: str
    vendor: str
    description: str
    memory_bytes: MemorySize
    usable_memory_bytes: MemorySize
    memory_bandwidth: Bandwidth
    peak_flops: dict[str, ComputeRate]
    vector_flops: ComputeRate | None = None
    emulates: dict[str, str] = Field(default_factory=dict)
    tiers: Annotated[tuple[Tier, ...], Field(min_length=1)]
    notes: tuple[str, ...] = ()
    kernels: dict[str, KernelFit]
    collectives: dict[str, CollectiveFit]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.usable_memory_bytes.value > self.memory_bytes.value:
            raise ValueError(
                f"usable_memory_bytes ({self.usable_memory_bytes.value:,.0f}) must not exceed memory_bytes "
                f"({self.memory_bytes.value:,.0f})"
            )
        self._check_dtypes()
        self._check_tiers()
        for key in self.kernels:
            op_class, _, detail = key.partition(":")
            if op_class not in list(OpClass) or (detail and detail not in (*BITS, *KERNEL_FAMILIES)):
                raise ValueError(
                    f"kernels.{key}: a key is one of {', '.join(OpClass)}, optionally ':' and a dtype or one of "
                    f"{', '.join(KERNEL_FAMILIES)}"
                )
        missing = [str(c) for c in OpClass if c not in self.kernels]
        if missing:
            raise ValueError(f"kernels: no fit for {', '.join(missing)}")
        if set(self.collectives) != set(COLLECTIVES):
            found = ", ".join(self.collectives) or "none"
            raise ValueError(f"collectives must be exactly {', '.join(COLLECTIVES)}; found {found}")
        return self

    def _check_dtypes(self) -> None:
        if "bfloat16" not in self.peak_flops:
            raise ValueError(f"peak_flops must give a rate for bfloat16; found {', '.join(self.peak_flops) or 'none'}")
        for dtype in (*self.peak_flops, *self.emulates):
            if dtype not in BITS:
                raise ValueError(f"dtype {dtype!r} is unknown; known: {', '.join(BITS)}")
        for dtype, stand_in in self.emulates.items():
            if dtype in self.peak_flops:
                raise ValueError(f"emulates.{dtype}: the device has a rate of its own for it")
            if stand_in not in self.peak_flops:
                raise ValueError(f"emulates.{dtype}: {stand_in!r} has no rate in peak_flops")

    def _check_tiers(self) -> None:
        *inner, outermost = self.tiers
        if outermost.size is not None:
            raise ValueError(
                f"tiers: the outermost tier must have 'size: null' (unbounded); {outermost.name} has {outermost.size}"
            )
        previous = 1
        for tier in inner:
            if tier.size is None:
                raise ValueError(f"tiers: only the outermost tier may be unbounded, {tier.name} is not the last")
            if tier.size <= previous or tier.size % previous:
                raise ValueError(f"tiers: size {tier.size} of {tier.name} must be a larger multiple of {previous}")
            previous = tier.size

    def compute_dtype(self, dtype: str) -> str:
        """The dtype whose rate a kernel with operands of ``dtype`` runs at: itself, or what emulates it.

        Raises:
            ConfigError: the device neither has a rate for ``dtype`` nor kernels that compute it in another one.
        """
        if dtype in self.peak_flops:
            return dtype
        if dtype in self.emulates:
            return self.emulates[dtype]
        emulated = f"; {', '.join(self.emulates)} by emulation" if self.emulates else ""
        raise ConfigError(
            f"{self.name} cannot compute in {dtype}: it has rates for {', '.join(self.peak_flops)}{emulated}; "
            "choose another --quantize-linear-action or another device"
        )

    def flops(self, dtype: str) -> float:
        """Peak FLOP/s of kernels with operands of ``dtype``. Raises :class:`ConfigError` as :meth:`compute_dtype`."""
        return self.peak_flops[self.compute_dtype(dtype)].value

    def kernel(self, op_class: OpClass, dtype: str) -> KernelFit:
        """The fit of ``op_class`` at compute dtype ``dtype``: the specific one if there is one, else the general."""
        return self.kernels.get(f"{op_class}:{dtype}") or self.kernels[op_class]
