"""Element types by name. Names follow torch without the ``torch.`` prefix, so a trace needs no torch to be read."""

from __future__ import annotations

from tensor_cast.errors import UnknownNameError

#: Bits per element. Sub-byte types are packed.
BITS: dict[str, int] = {
    "float64": 64,
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "float8_e8m0fnu": 8,
    "float4_e2m1fn": 4,
    "int64": 64,
    "int32": 32,
    "int16": 16,
    "int8": 8,
    "uint8": 8,
    "int4": 4,
    "complex64": 64,
    "complex128": 128,
    "bool": 8,
}


def bits_of(dtype: str) -> int:
    """Bits per element of ``dtype``. Raises :class:`UnknownNameError`."""
    try:
        return BITS[dtype]
    except KeyError:
        raise UnknownNameError("dtype", dtype, BITS) from None


def bytes_of(dtype: str) -> float:
    """Bytes per element of ``dtype``; half a byte for the packed 4-bit types."""
    return bits_of(dtype) / 8
