"""Time of local ops: never faster than physics, the right coefficients, no dtype for free."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensor_cast.device.catalog import device_names, load_device
from tensor_cast.device.profile import DeviceProfile, KernelFit, OpClass
from tensor_cast.errors import ConfigError
from tensor_cast.performance_model.analytic import Bound, kernel_fit, kernel_seconds, kernel_time, physical_bounds
from tensor_cast.performance_model.base import FREE, OpCost


def device(**kernels: KernelFit) -> DeviceProfile:
    """1 TFLOP/s in bf16, 2 in fp8, 100 GB/s, kernels at half of each after 1 us unless ``kernels`` says otherwise."""
    half = KernelFit(floor_s=1e-6, compute=0.5, memory=0.5, source="test")
    collective = {"alpha_s": 1e-6, "efficiency": 0.5, "source": "test"}
    return DeviceProfile.model_validate(
        {
            "name": "TEST",
            "vendor": "none",
            "description": "",
            "memory_bytes": {"value": 1e10, "source": "test"},
            "usable_memory_bytes": {"value": 1e10, "source": "test"},
            "memory_bandwidth": {"value": 1e11, "source": "test"},
            "peak_flops": {
                "bfloat16": {"value": 1e12, "source": "test"},
                "float8_e4m3fn": {"value": 2e12, "source": "test"},
            },
            "emulates": {"int4": "bfloat16"},
            "tiers": [{"name": "node", "size": None, "bandwidth": {"value": 1e10, "source": "test"}, "latency_s": 0}],
            "kernels": {**{str(c): half for c in OpClass}, **{k.replace("__", ":"): v for k, v in kernels.items()}},
            "collectives": dict.fromkeys(
                ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"), collective
            ),
        }
    )


def gemm(flops: float = 0.0, nbytes: float = 0.0, dtype: str = "bfloat16", **more: object) -> OpCost:
    return OpCost(OpClass.GEMM, flops=flops, compute_dtype=dtype, bytes_read=nbytes, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cost", "seconds", "bound"),
    [
        (gemm(5e9), 1e-6 + 1e-2, Bound.COMPUTE),
        (gemm(nbytes=5e8), 1e-6 + 1e-2, Bound.MEMORY),
        (gemm(1, 1), 1e-6, Bound.LATENCY),
        (gemm(5e9, dtype="float8_e4m3fn"), 1e-6 + 5e-3, Bound.COMPUTE),
        (gemm(5e9, dtype="int4"), 1e-6 + 1e-2, Bound.COMPUTE),  # emulated at the bf16 rate
        (gemm(1e9, padded_flops=5e9), 1e-6 + 1e-2, Bound.COMPUTE),
    ],
)
def test_roofline_by_hand(cost: OpCost, seconds: float, bound: Bound) -> None:
    time = kernel_time(cost, device())
    assert time.seconds == pytest.approx(seconds, rel=1e-4)
    assert time.bound is bound
    assert kernel_seconds(cost, device()) == time.seconds


def test_tiles_stretch_their_leg() -> None:
    fit = KernelFit(floor_s=0, compute=1, memory=1, compute_tiles=10, memory_tiles=30, source="test")
    chip = device(gemm=fit)
    assert kernel_seconds(gemm(1e9, tiles=10), chip) == pytest.approx(2e-3)
    assert kernel_seconds(gemm(nbytes=1e8, tiles=10), chip) == pytest.approx(4e-3)
    assert kernel_seconds(gemm(1e9, tiles=1e9), chip) == pytest.approx(1e-3)


def test_the_most_specific_fit_wins() -> None:
    specific = KernelFit(floor_s=2e-6, compute=1, memory=1, source="fp8")
    family = KernelFit(floor_s=3e-6, compute=1, memory=1, source="blocks")
    chip = device(gemm__float8_e4m3fn=specific, gemm__fp8_block=family)
    assert kernel_fit(gemm(dtype="float8_e4m3fn"), chip)[0] == "gemm:float8_e4m3fn"
    assert kernel_fit(gemm(dtype="float8_e4m3fn", variant="fp8_block"), chip)[0] == "gemm:fp8_block"
    assert kernel_fit(gemm(), chip)[0] == "gemm"
    assert "blocks" in kernel_time(gemm(dtype="float8_e4m3fn", variant="fp8_block"), chip).source


def test_a_dtype_without_rate_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"TEST.*float4_e2m1fn.*bfloat16, float8_e4m3fn"):
        kernel_seconds(gemm(1.0, dtype="float4_e2m1fn"), device())


def test_emulation_is_told() -> None:
    assert "int4 computed in bfloat16" in kernel_time(gemm(1.0, dtype="int4"), device()).source


def test_free_op_takes_no_time() -> None:
    assert kernel_seconds(FREE, device()) == 0.0
    assert kernel_time(FREE, device()).seconds == 0.0


@given(
    name=st.sampled_from(device_names()),
    op_class=st.sampled_from(list(OpClass)),
    flops=st.floats(0, 1e15),
    nbytes=st.floats(0, 1e12),
    tiles=st.floats(1, 1e5),
)
def test_no_op_beats_physics(name: str, op_class: OpClass, flops: float, nbytes: float, tiles: float) -> None:
    chip = load_device(name)
    dtype = "" if op_class in (OpClass.POINTWISE, OpClass.SAMPLING) else "bfloat16"
    cost = OpCost(op_class, flops=flops, compute_dtype=dtype, bytes_read=nbytes, tiles=tiles)
    assert kernel_seconds(cost, chip) >= max(physical_bounds(cost, chip)) * (1 - 1e-12)


def test_arrays_keep_their_shape_and_bounds() -> None:
    cost = gemm(np.array([1.0, 5e9]), np.array([5e8, 1.0]))  # type: ignore[arg-type]
    time = kernel_time(cost, device())
    assert time.seconds.shape == (2,)
    assert list(time.bound) == [Bound.MEMORY, Bound.COMPUTE]


def test_every_device_prices_every_matrix_class_in_bf16() -> None:
    for name in device_names():
        for op_class in OpClass:
            cost = OpCost(op_class, flops=1e9, compute_dtype="bfloat16", bytes_read=1e6, tiles=4)
            assert kernel_seconds(cost, load_device(name)) > 0


def attention(cache: str) -> OpCost:
    return OpCost(OpClass.ATTENTION_DECODE, 1e9, "bfloat16", bytes_read=5e8, cache_dtype=cache)


def test_cache_in_a_type_of_its_own() -> None:
    """Native: nothing to say. With kernels that widen it: said. Without: refused, with what is allowed."""
    native = kernel_time(attention("float8_e4m3fn"), load_device("H100_SXM"))
    widened = kernel_time(attention("float8_e4m3fn"), load_device("A100_80G_SXM"))
    assert "cache" not in native.source
    assert widened.source.endswith("float8_e4m3fn cache widened to bfloat16 in the kernel")
    ascend = load_device("ATLAS_800_A3_752T_128G_DIE")
    with pytest.raises(ConfigError, match=r"cannot read a float8_e4m3fn KV cache.*\(DISABLED, INT8\)"):
        kernel_seconds(attention("float8_e4m3fn"), ascend)
    kernel_seconds(attention("int8"), ascend)


def test_other_eight_bit_type_before_sixteen_bits() -> None:
    fit = KernelFit(floor_s=2e-6, compute=1, memory=1, source="fp8")
    chip = device(gemm__float8_e4m3fn=fit)
    chip = chip.model_copy(update={"peak_flops": {**chip.peak_flops, "int8": chip.peak_flops["float8_e4m3fn"]}})
    assert kernel_fit(gemm(dtype="int8"), chip)[0] == "gemm:float8_e4m3fn"
    assert kernel_fit(gemm(dtype="int8"), device().model_copy(update={"peak_flops": chip.peak_flops}))[0] == "gemm"
