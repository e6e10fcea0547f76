"""One serving engine: what differs between engines for the same model on the same device.

An engine is one YAML file in ``configs/engines``. It owns the DCP semantics, KV formats and block size, how memory is
budgeted, and what the host adds to each step.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

Fraction = Annotated[float, Field(gt=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]


class EngineProfile(BaseModel):
    """Behaviour of an engine, each number from its source code or from measurements (``sources``).

    Args:
        dcp_semantics: default of ``--dcp-semantics``.
        block_size: tokens per physical KV block.
        gpu_memory_utilization: share of usable memory the engine takes.
        non_torch_gib: memory outside the allocator (context, collectives).
        graph_gib: captured graphs.
        max_batched_tokens: token budget of a step.
        host_step_s: host time per step that is not hidden behind the device.
        all_reduces_once: whether shared and routed experts share one all_reduce.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    version: str
    description: str
    dcp_semantics: str
    block_size: PositiveInt
    gpu_memory_utilization: Fraction
    non_torch_gib: NonNegative
    graph_gib: NonNegative
    max_batched_tokens: PositiveInt
    max_num_seqs: NonNegativeInt
    host_step_s: NonNegative
    moe_data_parallel: bool = False
    sources: dict[str, str] = Field(default_factory=dict)
