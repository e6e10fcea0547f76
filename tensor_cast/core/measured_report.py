"""What there is to say of a measured start-up beside its numbers: its own KV cache, and remarks."""

from __future__ import annotations

from typing import Any

from tensor_cast.core.measured import Measured, StageKind
from tensor_cast.units import GIB

__all__ = ["communication", "measured_json", "remarks"]

#: Above this share a cache is not the one that the engine had.
_SAME_CACHE = 0.01


def _counted(measured: Measured) -> list[tuple[str, int, int]]:
    """(what, as the engine printed it, as we make it of its KV memory)."""
    calibration, predicted = measured.calibration, measured.predicted
    if predicted is None:
        return []
    pairs = (
        ("tokens", calibration.kv_tokens, predicted.kv_tokens),
        ("blocks", calibration.num_blocks, predicted.num_blocks),
    )
    return [(what, printed, ours) for what, printed, ours in pairs if printed is not None]


def remarks(measured: Measured) -> list[str]:
    """Lines for below the table."""
    lines = [
        f"KV cache of the measured run: {printed:,} {what} printed, {ours:,} predicted from its KV memory "
        f"({ours / printed - 1:+.2%})"
        for what, printed, ours in _counted(measured)
    ]
    if any(abs(ours / printed - 1) > _SAME_CACHE for _, printed, ours in _counted(measured)):
        lines.append(
            "That is not the cache that the engine had: another MODEL, --kv-cache-dtype, --block-size, "
            "--max-num-batched-tokens or --dsa-split?"
        )
    if measured.other_model is not None:
        lines.append(f"The log names another model: {measured.other_model}")
    if moved := communication(measured):
        lines.append(moved)
    return lines + [f"Note: {note}" for note in measured.calibration.notes]


def communication(measured: Measured) -> str:
    """What was done about communicators that only one of the two layouts has; empty where nothing was."""
    if measured.communication > 0:
        return (
            f"The measured rank was alone: {measured.communication / GIB:.2f} GiB are added to its non-torch memory "
            "for communicators (estimate of the engine's profile, not measured)"
        )
    taken = -measured.communication_of(StageKind.ONLY)
    if taken == 0:
        return ""
    return (
        f"The measured ranks had communicators, a rank alone has none: {taken / GIB:.2f} GiB are taken off their "
        "non-torch memory (estimate of the engine's profile, not measured)"
    )


def measured_json(measured: Measured) -> dict[str, Any]:
    """The measured run in the public JSON form."""
    calibration = measured.calibration
    return {
        "source": calibration.source,
        "engine": calibration.engine,
        "model": calibration.model,
        "other_model": measured.other_model is not None,
        "layout": measured.layout,
        "partition": list(measured.partition),
        "communication_gib": measured.communication_of(StageKind.ONLY) / GIB,
        "kv_cache": {
            what: {"measured": printed, "predicted": ours, "difference": ours / printed - 1}
            for what, printed, ours in _counted(measured)
        },
        "notes": list(calibration.notes),
    }
