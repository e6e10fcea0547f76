"""Limits of a step that an engine chooses for a device when the user gives none."""

from __future__ import annotations

from dataclasses import dataclass

from tensor_cast.device.profile import DeviceProfile
from tensor_cast.engine.profile import EngineProfile
from tensor_cast.units import GIB

__all__ = ["StepLimits", "step_limits"]

#: vLLM's classes of devices: memory in bytes from which on -> (tokens of a step, requests of a step).
_VLLM = ((160 * 10**9, 16_384, 1024), (70 * GIB, 8192, 1024), (0, 2048, 256))


@dataclass(frozen=True, slots=True)
class StepLimits:
    """``max_batched_tokens`` and ``max_num_seqs`` of a step."""

    max_batched_tokens: int
    max_num_seqs: int


def step_limits(engine: EngineProfile, device: DeviceProfile) -> StepLimits:
    """What the engine's server takes by default: vLLM by the memory of the device, others the profile's values.

    An A100 counts as small whatever its memory (by its name, so an A800 does not).
    Source: vLLM 0.30 ``engine/arg_utils.py``.
    """
    if engine.name != "vllm":
        return StepLimits(engine.max_batched_tokens, engine.max_num_seqs)
    small = device.name.casefold().startswith("a100")
    room = 0 if small else device.memory_bytes.value
    return next(StepLimits(tokens, seqs) for least, tokens, seqs in _VLLM if room >= least)
