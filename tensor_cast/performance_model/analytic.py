"""Time of a local op on one device: a launch floor plus the slower of the two roofline legs.

``time = floor_s + max(flops / (peak * compute), bytes / (bandwidth * memory))`` with the coefficients that the device
profile holds for the op's class of kernels; where measurements ask for it a leg is stretched by ``1 + n0/n``, n being
the tiles that the work splits into, or the streams that the memory traffic splits into. Every efficiency is at most 1,
so no op is faster than physics allows; and no leg shrinks as the sizes grow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from tensor_cast.device.profile import DeviceProfile, KernelFit, OpClass
from tensor_cast.errors import ConfigError
from tensor_cast.ir.expr import Num
from tensor_cast.performance_model.base import OpCost
from tensor_cast.quant import KV_SCHEMES

__all__ = ["Bound", "OpTime", "kernel_fit", "kernel_seconds", "kernel_time"]


class Bound(StrEnum):
    """What an op waits for."""

    COMPUTE = "compute"
    MEMORY = "memory"
    LATENCY = "latency"
    NETWORK = "network"


_ORDER = (Bound.COMPUTE, Bound.MEMORY, Bound.LATENCY, Bound.NETWORK)


@dataclass(frozen=True, slots=True)
class OpTime:
    """Seconds of one call with what they are made of; arrays where the cost holds arrays.

    Args:
        seconds: the whole.
        compute_s, memory_s: the two legs of the roofline, efficiency included.
        latency_s: what does not go away with size.
        network_s: transfer time of a collective.
        source: where the coefficients come from.
    """

    seconds: Num
    compute_s: Num
    memory_s: Num
    latency_s: Num
    network_s: Num
    source: str

    @property
    def bound(self) -> Num:
        """:class:`Bound` of each point: the largest share."""
        index = self._largest()
        return _ORDER[int(index)] if index.ndim == 0 else np.array(_ORDER, dtype=object)[index]

    def by_bound(self) -> Iterator[tuple[Bound, Num]]:
        """(bound, seconds) for each bound that some point has: the whole time there, 0 at the other points."""
        index = self._largest()
        if index.ndim == 0 or (index == index.flat[0]).all():
            yield _ORDER[int(index.flat[0])], self.seconds
            return
        for which in np.unique(index):
            yield _ORDER[which], np.where(index == which, self.seconds, 0.0)

    def _largest(self) -> NDArray[np.intp]:
        shares = np.broadcast_arrays(self.compute_s, self.memory_s, self.latency_s, self.network_s)
        return np.asarray(np.argmax(np.stack(shares), axis=0))


#: Types whose kernels move and multiply the same bytes at the same rate.
EIGHT_BIT = ("float8_e4m3fn", "float8_e5m2", "int8")


def _compute_dtype(cost: OpCost, device: DeviceProfile) -> str:
    return device.compute_dtype(cost.compute_dtype) if cost.compute_dtype else ""


def kernel_fit(cost: OpCost, device: DeviceProfile) -> tuple[str, KernelFit]:
    """The most specific fit: of the kernel family, of the dtype the kernel computes in, of its width, of the op class.

    Where int8 (or fp8) products have no fit of their own, those of the other 8-bit type tell more than 16-bit ones.

    Raises:
        ConfigError: the device cannot compute in the op's dtype, not even in another one.
    """
    assert cost.op_class is not None
    dtype = _compute_dtype(cost, device)
    # An emulated dtype runs the kernels of the dtype it is emulated in, whatever its family.
    variant = cost.variant if dtype == cost.compute_dtype else ""
    alike = EIGHT_BIT if dtype in EIGHT_BIT else ()
    for detail in (variant, dtype, *alike):
        key = f"{cost.op_class}:{detail}"
        if detail and key in device.kernels:
            return key, device.kernels[key]
    return str(cost.op_class), device.kernels[cost.op_class]


def _rate(cost: OpCost, device: DeviceProfile) -> float | None:
    """Peak FLOP/s; None for vector work on a device that states no vector rate (memory then bounds it)."""
    if cost.compute_dtype:
        return device.flops(cost.compute_dtype)
    return device.vector_flops.value if device.vector_flops else None


def _legs(cost: OpCost, device: DeviceProfile, fit: KernelFit) -> tuple[Num, Num]:
    rate = _rate(cost, device)
    flops = cost.flops if cost.padded_flops is None else cost.padded_flops
    compute_s = flops / (rate * fit.compute) if rate else 0.0
    memory_s = cost.nbytes / (device.memory_bandwidth.value * fit.memory)
    if cost.tiles is None:
        return compute_s, memory_s
    # Few tiles leave cores idle.
    if fit.compute_tiles:
        compute_s = compute_s * (1 + fit.compute_tiles / cost.tiles)
    if fit.memory_tiles:
        memory_s = memory_s * (1 + fit.memory_tiles / (cost.tiles if cost.streams is None else cost.streams))
    return compute_s, memory_s


def _cache_note(cost: OpCost, device: DeviceProfile) -> str:
    """What a cache in a type that the device does not multiply is widened to inside the kernel; empty for others.

    Raises:
        ConfigError: the device neither computes in that type nor has kernels that widen it.
    """
    if not cost.cache_dtype or cost.cache_dtype in device.peak_flops:
        return ""
    if cost.cache_dtype in device.emulates:
        return f"; {cost.cache_dtype} cache widened to {cost.compute_dtype} in the kernel"
    able = ", ".join(name for name, dtype in KV_SCHEMES.items() if dtype is None or dtype in device.peak_flops)
    raise ConfigError(
        f"{device.name} cannot read a {cost.cache_dtype} KV cache: no rate and no kernels for that type; "
        f"choose another --quantize-attention-action ({able}) or another device"
    )


def kernel_seconds(cost: OpCost, device: DeviceProfile) -> Num:
    """Seconds of one call of a local op; 0 when it launches nothing."""
    if cost.free or cost.op_class is None:
        return 0.0
    _cache_note(cost, device)
    _, fit = kernel_fit(cost, device)
    return fit.floor_s + np.maximum(*_legs(cost, device, fit))


def kernel_time(cost: OpCost, device: DeviceProfile) -> OpTime:
    """As :func:`kernel_seconds`, with the parts and the source of the coefficients."""
    if cost.free or cost.op_class is None:
        return OpTime(0.0, 0.0, 0.0, 0.0, 0.0, "free: no kernel")
    key, fit = kernel_fit(cost, device)
    compute_s, memory_s = _legs(cost, device, fit)
    seconds = fit.floor_s + np.maximum(compute_s, memory_s)
    emulated = _compute_dtype(cost, device)
    note = f"; {cost.compute_dtype} computed in {emulated}" if emulated != cost.compute_dtype else ""
    note += _cache_note(cost, device)
    return OpTime(seconds, compute_s, memory_s, fit.floor_s, 0.0, f"{device.name} {key}: {fit.source}{note}")


def physical_bounds(cost: OpCost, device: DeviceProfile) -> tuple[Num, Num]:
    """(compute, memory) seconds at the device's full rates: no op can be faster than either."""
    rate = _rate(cost, device)
    return (cost.flops / rate if rate else 0.0), cost.nbytes / device.memory_bandwidth.value


#: Classes whose kernels run on the matrix units.
MATRIX_CLASSES = frozenset(set(OpClass) - {OpClass.POINTWISE, OpClass.SAMPLING})
