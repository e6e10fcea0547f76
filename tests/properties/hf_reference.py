"""The unsharded model as Transformers itself has it, on meta tensors: its parameters and what its products cost.

Nothing of this repository runs here but the reading of the configuration: attention is Transformers' eager code,
experts its batched products, FLOPs are torch's own count.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from tensor_cast.model_catalog import load_model_config
from tensor_cast.model_config import ModelConfig
from tensor_cast.tracer.builder import hf_config

#: Prompt on which FLOPs are counted: longer than gpt-oss's window of 128.
BATCH, QUERY = 3, 150
_PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm}


@dataclass(frozen=True)
class Reference:
    """Shapes of the state by name, tied names included once per name, and FLOPs by the module that spends them."""

    shapes: dict[str, tuple[int, ...]]
    tied: dict[str, str]
    flops: dict[str, int]


def reference(model: str | ModelConfig) -> Reference:
    """The reference of a model; equal architectures share one."""
    config = load_model_config(model) if isinstance(model, str) else model
    values = json.loads(config.hf_config)
    values.pop("quantization_config", None)
    return _reference(json.dumps(values, sort_keys=True), _Held(config))


class _Held:
    """A value that takes no part in a cache key."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held)

    def __hash__(self) -> int:
        return 0


@cache
def _reference(_: str, held: _Held) -> Reference:
    with no_init_weights(), torch.device("meta"):
        config = hf_config(held.config)
        config.use_cache = False
        config._experts_implementation = "batched_mm"
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager").eval()
    model.tie_weights()
    state = {**dict(model.named_parameters(remove_duplicate=False)), **_buffers(model)}
    first: dict[int, str] = {}
    tied = {name: first[id(t)] for name, t in state.items() if first.setdefault(id(t), name) != name}
    with torch.inference_mode(), torch.device("meta"), FlopCounterMode(display=False) as counter:
        model(
            input_ids=torch.empty(BATCH, QUERY, dtype=torch.int64),
            position_ids=torch.arange(QUERY).expand(BATCH, -1),
            attention_mask=torch.zeros(BATCH, 1, QUERY, QUERY, dtype=torch.bfloat16),
        )
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    return Reference(shapes, tied, _own_flops(counter, type(model).__name__))


def _buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that a checkpoint holds."""
    return {name: model.get_buffer(name) for name in model.state_dict() if name in dict(model.named_buffers())}


def _own_flops(counter: FlopCounterMode, root: str) -> dict[str, int]:
    """FLOPs of each module without its children."""
    total = {
        name.removeprefix(f"{root}.") if name != root else "": sum(c for op, c in ops.items() if op in _PRODUCTS)
        for name, ops in counter.get_flop_counts().items()
        if name == root or name.startswith(f"{root}.")
    }
    own = dict(total)
    for name, flops in total.items():
        if name:
            parent = name.rpartition(".")[0]
            while parent not in own:
                parent = parent.rpartition(".")[0]
            own[parent] -= flops
    return {name: flops for name, flops in own.items() if flops}
