"""State of recurrent layers: gated delta nets, as Qwen3-Next interleaves them with attention.

Source: vLLM 0.30 ``model_executor/layers/mamba/mamba_utils.py``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache

from tensor_cast.dtypes import bits_of
from tensor_cast.errors import UnsupportedModelError
from tensor_cast.model_config import ModelConfig

__all__ = ["RecurrentState", "recurrent_state"]


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """What a gated delta net keeps of a sequence: a window of its convolution's inputs, and one matrix per value head.

    Args:
        layers: for each decoder layer, whether it is recurrent.
        key_heads, value_heads: heads of the layer.
        key_dim, value_dim: elements of each.
        kernel: width of the convolution.
        conv_dtype, matrix_dtype: of the two states.
    """

    layers: tuple[bool, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    conv_dtype: str
    matrix_dtype: str

    def nbytes(self, tp: int = 1, num_mtp_tokens: int = 0) -> int:
        """Bytes of one state on one of ``tp`` ranks; draft tokens widen the convolution's window."""
        channels = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
        window = (self.kernel - 1 + num_mtp_tokens) * channels // tp * bits_of(self.conv_dtype) // 8
        matrices = self.value_heads // tp * self.key_dim * self.value_dim * bits_of(self.matrix_dtype) // 8
        return window + matrices


@lru_cache(maxsize=64)
def recurrent_state(model: ModelConfig) -> RecurrentState | None:
    """The state of ``model``'s recurrent layers; None where every layer attends.

    Raises:
        UnsupportedModelError: recurrent layers of a kind that is not described.
    """
    config = json.loads(model.hf_config)
    kinds, interval = config.get("layer_types"), config.get("full_attention_interval")
    if kinds is None and interval and "linear_num_value_heads" in config:
        # Every n-th layer attends, the others are recurrent.
        kinds = [
            "full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(model.num_hidden_layers)
        ]
    if "linear_attention" not in (kinds or ()):
        return None
    try:
        return RecurrentState(
            layers=tuple(kind == "linear_attention" for kind in kinds),
            key_heads=config["linear_num_key_heads"],
            value_heads=config["linear_num_value_heads"],
            key_dim=config["linear_key_head_dim"],
            value_dim=config["linear_value_head_dim"],
            kernel=config["linear_conv_kernel_dim"],
            conv_dtype=model.dtype,
            matrix_dtype=config.get("mamba_ssm_dtype") or model.dtype,
        )
    except KeyError as error:
        raise UnsupportedModelError(
            f"{model.model_id}: linear_attention layers without {error.args[0]} keep a state that is not described yet"
        ) from None
