"""One serving engine: what differs between engines for the same model on the same device.

An engine is one YAML file in ``configs/engines``. It owns the DCP semantics, KV formats and block size, how memory is
budgeted, and what the host adds to each step.
"""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from tensor_cast.engine.expert_kernels import EXPERT_KERNELS, ExpertKernel
from tensor_cast.model_config import AttentionKind

Fraction = Annotated[float, Field(gt=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]

_TEXTS = ("name", "version", "description", "sources")


class ExpertKernelRule(BaseModel):
    """``kernel`` keeps MXFP4 experts on devices whose names match one of ``devices`` (``H100*``)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kernel: str
    devices: tuple[str, ...]


class EngineProfile(BaseModel):
    """Behaviour of an engine, each value from its source code or from measurements (``sources``, by field).

    Args:
        dcp_semantics: default of ``--dcp-semantics``.
        block_size: tokens per physical KV block of a GQA model; ``mla_block_size`` of an MLA or DSA model.
        gpu_memory_utilization: share of usable memory the engine takes.
        non_torch_gib: memory outside the allocator of a single device (context, libraries).
        collective_gib: what is added to it once the device takes part in collectives.
        graph_gib: captured graphs.
        max_batched_tokens: token budget of a step.
        max_num_seqs: requests in a step at most.
        host_step_s: host time per step that is not hidden behind the device.
        pp_extra_batches: batches that a pipeline keeps in flight beyond one for each stage.
        pp_overlap: transfers between stages do not hold up the receiving stage.
        mxfp4_experts: which kernel keeps MXFP4 experts on which devices; the first rule that matches. None matches: as
            the checkpoint has them.
        sparse_head_tiles: heads of a rank that a tile of sparse attention holds, smallest first; fewer are padded to
            the next, more to whole ones of the largest. Without any, heads are computed as they are.
        profiles_kernels: kernels' buffers are sized ahead, and the profile run samples.
        moe_data_parallel: whether experts may be replicated over data-parallel ranks, and EP smaller than tp * dp.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    version: str
    description: str
    dcp_semantics: str
    block_size: PositiveInt
    mla_block_size: PositiveInt
    gpu_memory_utilization: Fraction
    non_torch_gib: NonNegative
    collective_gib: NonNegative
    graph_gib: NonNegative
    max_batched_tokens: PositiveInt
    max_num_seqs: NonNegativeInt
    host_step_s: NonNegative
    pp_extra_batches: NonNegativeInt = 0
    pp_overlap: bool = False
    mxfp4_experts: tuple[ExpertKernelRule, ...] = ()
    sparse_head_tiles: tuple[PositiveInt, ...] = ()
    profiles_kernels: bool = True
    moe_data_parallel: bool = False
    sources: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _every_value_has_a_source(self) -> Self:
        values = [name for name in type(self).model_fields if name not in _TEXTS]
        stated = [
            name for name in values if type(self).model_fields[name].is_required() or name in self.model_fields_set
        ]
        if missing := [name for name in stated if name not in self.sources]:
            raise ValueError(f"sources: no source for {', '.join(missing)}")
        if unknown := [name for name in self.sources if name not in values]:
            raise ValueError(f"sources: {', '.join(unknown)} is no value of an engine")
        return self

    def expert_kernel(self, device: str) -> ExpertKernel | None:
        """The kernel that keeps MXFP4 experts on the device of that name; None keeps them as they were loaded.

        Raises:
            UnknownNameError: the profile names a kernel that is not known.
        """
        for rule in self.mxfp4_experts:
            if any(fnmatch(device.upper(), pattern.upper()) for pattern in rule.devices):
                return EXPERT_KERNELS.get(rule.kernel)
        return None

    def block_size_for(self, attention: AttentionKind) -> int:
        """Tokens per physical KV block that the engine picks for this kind of attention."""
        return self.block_size if attention is AttentionKind.GQA else self.mla_block_size

    def batches_in_flight(self, stages: int) -> int:
        """Batches that the engine keeps in a pipeline of ``stages`` stages; 1 without a pipeline."""
        return stages + self.pp_extra_batches if stages > 1 else 1

    def non_torch_gib_for(self, devices: int) -> float:
        """GiB outside the allocator on each of ``devices`` devices of an instance."""
        return self.non_torch_gib + (self.collective_gib if devices > 1 else 0.0)
