"""How kernels for MXFP4 experts keep their weights: padded, and some with the scales twice.

The checkpoint's bytes are those of :class:`tensor_cast.quant.QuantConfig`; what stays on a device depends on the kernel
that the engine picks for it (``mxfp4_experts`` of its profile).
Source: vLLM 0.30 ``fused_moe/oracle/mxfp4.py``, ``quantization/mxfp4.py``; triton_kernels ``hopper_scale.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from tensor_cast.registry import Registry
from tensor_cast.units import ceil_div, round_up

__all__ = ["EXPERT_KERNELS", "MXFP4_GROUP", "ExpertKernel"]

#: Elements that share a scale of one byte.
MXFP4_GROUP = 32


@dataclass(frozen=True, slots=True)
class ExpertKernel:
    """One kernel family.

    Args:
        name: what the engine calls it.
        hidden, intermediate: multiples that the hidden size, and a rank's part of an expert's width, are padded to.
        bias_bytes: of an element of the biases.
        swizzled_rows: above 0 the kernel reads a copy of the scales, whose rows are padded to this multiple and whose
            columns to an even number; the scales as loaded stay beside it.
    """

    name: str
    hidden: int
    intermediate: int
    bias_bytes: int = 2
    swizzled_rows: int = 0

    def padded(self, hidden_size: int, width: int) -> tuple[int, int]:
        """(hidden size, width of an expert on a rank) as the kernel has them."""
        return round_up(hidden_size, self.hidden), round_up(width, self.intermediate)

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """What one expert's matrix of padded ``[rows, columns]`` keeps on the device, scales included."""
        scales = rows * ceil_div(columns, MXFP4_GROUP)
        if self.swizzled_rows:
            scales += round_up(rows, self.swizzled_rows) * round_up(ceil_div(columns, MXFP4_GROUP), 2)
        return rows * columns // 2 + scales


EXPERT_KERNELS: Registry[ExpertKernel] = Registry("kernel for MXFP4 experts")
EXPERT_KERNELS.register("marlin")(ExpertKernel("marlin", 256, 128))
# The weights are swizzled in place of the loaded ones, the scales beside them; biases are widened.
EXPERT_KERNELS.register("triton")(ExpertKernel("triton", 1, 64, bias_bytes=4, swizzled_rows=256))
EXPERT_KERNELS.register("trtllm")(ExpertKernel("trtllm", 256, 256, bias_bytes=4))
EXPERT_KERNELS.register("cutlass")(ExpertKernel("cutlass", 128, 128))
EXPERT_KERNELS.register("ck")(ExpertKernel("ck", 256, 256, bias_bytes=4))
