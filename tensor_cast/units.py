"""Units. Memory is counted in binary units (GiB), rates in SI units (bytes per second, FLOP per second)."""

from __future__ import annotations

KIB = 1024
MIB = 1024**2
GIB = 1024**3
TIB = 1024**4

GIGA = 10**9
TERA = 10**12

US = 1e-6
MS = 1e-3


def ceil_div(numerator: int, denominator: int) -> int:
    """Smallest integer that is not below ``numerator / denominator`` (exact for integers of any size)."""
    return -(-numerator // denominator)


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of ``multiple`` that is not below ``value``."""
    return ceil_div(value, multiple) * multiple
