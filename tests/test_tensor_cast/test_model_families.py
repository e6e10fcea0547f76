"""The promise to any config, over all families of Transformers: a trace with every op priced, or one clear sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.model_families import (
    CRASHED,
    HUNG,
    REFUSED,
    TRACED,
    architectures,
    default_config,
    differing,
    examine,
    run,
    sweep,
)
from tensor_cast.errors import ConfigError, UnsupportedModelError
from tensor_cast.layers.plan import ShardPlan
from tensor_cast.model_catalog import describe
from tensor_cast.tracer.boundary import plain_errors
from tensor_cast.tracer.trace import ModelTracer


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSMODELING_CACHE_DIR", str(tmp_path / "cache"))


#: One family for each way to end.
HANDFUL = [
    ("deepseek_v2", TRACED, ""),  # rotary tables as complex numbers
    ("gpt_neox", TRACED, ""),  # query, key and value of a head side by side in one projection
    ("stablelm", TRACED, ""),  # counts its heads itself
    ("nemotron", TRACED, ""),  # nulls in the config
    ("diffllama", REFUSED, "attends 2 times in a step"),
    ("dory", REFUSED, "layers of type mlp are not modelled yet"),
    ("bart", REFUSED, "bart is an encoder-decoder model"),
    ("mamba", REFUSED, "a model without attention"),
    ("mimo_v2_flash", REFUSED, "keys and values of different widths"),
    ("xglm", REFUSED, "does not attend through Transformers' attention interface"),
    ("qwen3_vl", REFUSED, "no causal language model of type 'qwen3_vl_text' on its own"),
]


@pytest.mark.parametrize(("family", "verdict", "reason"), HANDFUL, ids=lambda v: v if isinstance(v, str) else "")
def test_a_family_is_traced_or_refused_in_a_sentence(tmp_path: Path, family: str, verdict: str, reason: str) -> None:
    outcome = examine(family, default_config(family, architectures()[family]), tmp_path / family, prove=False)
    assert outcome.verdict == verdict, outcome
    assert reason in outcome.reason
    assert family in outcome.reason or verdict == TRACED  # the sentence names the model


@pytest.mark.slow
def test_all_families() -> None:
    outcomes = list(sweep())
    assert len(outcomes) > 250
    assert [o for o in outcomes if o.verdict in (CRASHED, HUNG)] == []
    assert all(o.verdict == TRACED for o in outcomes if o.verdict != REFUSED)
    assert differing(outcomes) == []


@pytest.mark.parametrize("family", ["deepseek_v2", "afmoe", "gpt_neox"])
def test_what_is_newly_traced_equals_transformers(tmp_path: Path, family: str) -> None:
    """Complex rotary tables; a gate on the heads' outputs, cut by heads; a packed projection, cut between heads."""
    config = default_config(family, architectures()[family])
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, _ = run(("verify", "{}", "--tp-size", "2", "--format", "json"), str(tmp_path), limit=300)
    result = json.loads(out)
    assert (code, result["first_mismatch"]) == (0, None)
    assert result["compared"] > 1000


# -- the boundary ---------------------------------------------------------------------------------------------------


def tiny(**changes: object) -> dict[str, object]:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
    return {"model_type": "llama", **sizes, "num_attention_heads": 4, "num_key_value_heads": 2, **changes}


def model(**changes: object):
    return describe(tiny(**changes), "some/model", "some/model")


def test_the_boundary_names_model_module_and_op_and_keeps_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(x)  # 64 wide where 96 are due

    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaMLP.forward", broken)
    with pytest.raises(UnsupportedModelError) as caught:
        ModelTracer(model()).skeleton()
    message = str(caught.value)
    assert message.startswith("some/model (llama) cannot be traced: ")
    assert "in model.layers.0.mlp.down_proj (Linear)" in message
    assert "docs/models.md" in message
    assert "\n" not in message
    assert not isinstance(caught.value.__cause__, UnsupportedModelError)
    assert caught.value.__cause__ is not None


def test_an_op_that_fixes_a_size_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own way of asking a symbol for its value: what it decides holds for one batch size only."""

    def broken(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[0] == 11  # the hint of B
        return self.down_proj(self.up_proj(x))

    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaMLP.forward", broken)
    with pytest.raises(UnsupportedModelError, match=r"some/model \(llama\) cannot be traced: .*tracing fixed B to 11"):
        ModelTracer(model()).skeleton()


def test_our_own_errors_pass_the_boundary() -> None:
    with pytest.raises(ConfigError, match=r"^mine$"), plain_errors(model()):
        raise ConfigError("mine")
    with pytest.raises(UnsupportedModelError, match=r"^some/model \(llama\): a part\.$"), plain_errors(model()):
        raise UnsupportedModelError("a part.")


def test_layers_in_a_loop_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaModel

    once = LlamaModel.forward

    def twice(self: nn.Module, *args: object, **kwargs: object):
        once(self, *args, **kwargs)
        return once(self, *args, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", twice)
    with pytest.raises(UnsupportedModelError, match=r"some/model \(llama\): the layers are not run once each"):
        ModelTracer(model()).skeleton()


@pytest.mark.parametrize(
    ("extra", "named"),
    [({"position_bias": torch.zeros(1)}, "position_bias"), ({"is_causal": False}, "is_causal=False")],
)
def test_attention_with_arguments_that_are_not_known_is_refused(extra: dict[str, object], named: str) -> None:
    from tensor_cast.layers.attention import attention_forward

    module = nn.Module()
    module.__dict__["attention_core"] = None
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(UnsupportedModelError, match=f"Module attends with {named}, which is not known"):
        attention_forward(module, q, q, q, **extra)


# -- cuts by structure ----------------------------------------------------------------------------------------------


class Gated(nn.Module):
    """Four heads of 8: with gates per element and per head, a vector per head and others that belong to no head."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 8
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(20, 32), nn.Linear(20, 16), nn.Linear(20, 16)
        self.o_proj = nn.Linear(32, 20)
        self.gate_proj, self.g_proj, self.latent = nn.Linear(20, 32), nn.Linear(20, 4), nn.Linear(20, 6)
        self.gate_bias = nn.Parameter(torch.zeros(4))
        self.scale = nn.Parameter(torch.zeros(8))


def test_gates_of_heads_are_cut_with_the_heads() -> None:
    rules = ShardPlan({}, {}, embedding="embed", head="head").rules("attn", Gated())
    for name in ("q_proj", "gate_proj", "g_proj"):
        (split,) = rules[f"attn.{name}"].params["weight"]
        assert (split.dim, split.axis, split.units) == (0, "tp", 4)
    assert "attn.latent" not in rules
    assert set(rules["attn"].params) == {"gate_bias"}
