"""Cutting a model for a rank: the original stays whole, and the pieces of all ranks are all there is.

That the ranks together compute what the whole model computes is tests/equivalence.
"""

from __future__ import annotations

import pytest
import torch
from test_layers_equal_transformers import randomised
from tracer_models import tiny

from tensor_cast.layers.context import ParallelContext
from tensor_cast.layers.program import Anatomy, RankProgram
from tensor_cast.tracer.builder import build


def test_cutting_leaves_the_model_whole() -> None:
    model = randomised(build(tiny("qwen3")))
    before = {name: (tensor.shape, tensor.sum().item()) for name, tensor in model.state_dict().items()}
    RankProgram(Anatomy(model), ParallelContext(tp=2, rank=1))
    assert {name: (tensor.shape, tensor.sum().item()) for name, tensor in model.state_dict().items()} == before
    assert not any("attention_core" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gpt_oss", "mixtral"])
def test_shards_add_up_to_the_parameter(name: str) -> None:
    """Every element of a split parameter is on exactly as many ranks as the layout says; nothing is lost."""
    model = build(tiny(name, vocab_size=130))
    with torch.no_grad():
        for number, tensor in enumerate(model.state_dict().values()):
            tensor.copy_((torch.arange(tensor.numel()) + 1 + number).view(tensor.shape))
    anatomy = Anatomy(model)
    layout = ParallelContext(tp=4, ep=2 if name != "llama" else 1)
    full = dict(model.state_dict())
    seen: dict[str, list[torch.Tensor]] = {}
    for rank in range(4):
        program = RankProgram(anatomy, layout.at(rank))
        for key, tensor in program.model.state_dict().items():
            if rank == 0 and key in program.sharder.params:
                assert tuple(tensor.shape) == program.sharder.params[key].shape
            seen.setdefault(key, []).append(tensor)
    specs = program.sharder.params
    for key, pieces in seen.items():
        ways = 1
        for _, _, count in specs[key].splits if key in specs else ():
            ways *= count
        total = sum(piece.double().sum().item() for piece in pieces)
        if key.endswith("bias") and len(pieces) < 4:
            continue  # a row-parallel bias lives on one rank
        assert total == pytest.approx(full[key].double().sum().item() * 4 / ways), key
