"""``msmodeling verify``: passes on the embedded configs, finds faults, refuses what is illegal."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial

import broken_program
import pytest

from tensor_cast.errors import UnsupportedModelError
from tensor_cast.model_catalog import load_model_config, model_names
from tensor_cast.proof import compare

FIELDS = {"equal", "compared", "max_abs_difference", "first_mismatch", "tolerance", "dtype", "model", "layouts"}

#: One model and layout for each kind of attention, of experts, and of type.
QUICK = [
    ("Qwen/Qwen3-30B-A3B", ("--tp-size", 2, "--dp-size", 2, "--ep-size", 4)),
    ("deepseek-ai/DeepSeek-R1", ("--tp-size", 4, "--dcp-size", 2, "--dcp-semantics", "vllm", "--num-mtp-tokens", 1)),
    ("openai/gpt-oss-20b", ("--tp-size", 2, "--dtype", "float32", "--seed", 3)),
]


@pytest.mark.parametrize(("model", "options"), QUICK, ids=lambda v: v if isinstance(v, str) else "")
def test_json_contract(run, model, options):
    result = run("verify", model, *options, "--format", "json")
    document = result.json()
    assert document["first_mismatch"] is None
    assert result.code == 0
    assert set(document) >= FIELDS
    assert document["equal"] is True
    assert 0 <= document["max_abs_difference"] <= document["tolerance"]
    (layout,) = document["layouts"]
    assert document["compared"] == layout["compared"] == sum(r["compared"] for r in layout["runs"]) > 1000
    assert all(r["traced_ops"] > 100 for r in layout["runs"])
    drafts = 1 if "--num-mtp-tokens" in options else 2
    assert [r["query_len"] for r in layout["runs"]][:2] == [1, 1 + drafts]


def test_more_ranks_than_fit_keep_their_character(run):
    arguments = ("--tp-size", 16, "--dp-size", 4, "--ep-size", 64, "--dcp-size", 4, "--block-size", 128)
    (layout,) = run("verify", "deepseek-ai/DeepSeek-R1", *arguments, "--plan", "--format", "json").json()["layouts"]
    assert layout["layout"].startswith("tp16 dp4 ep64 dcp4")
    assert layout["ran_as"].startswith("tp4 dp2 ep8 dcp2")
    assert layout["shrunk"]["hidden_size"] == {"from": 7168, "to": 64}


def test_a_difference_is_exit_code_1(run, monkeypatch):
    monkeypatch.setattr(compare, "run_cell", partial(compare.run_cell, inside=broken_program.forgotten_reduce))
    result = run("verify", "Qwen/Qwen3-8B", "--tp-size", 2, "--format", "json")
    document = result.json()
    assert result.code == 1
    assert document["equal"] is False
    assert document["max_abs_difference"] > 1e-3
    assert document["first_mismatch"].startswith("tp2: query length 1, prompt, rank 0, request 0, token at position 0")
    assert "layer 0" in document["first_mismatch"]
    table = run("verify", "Qwen/Qwen3-8B", "--tp-size", 2)
    assert table.code == 1
    assert "DIFFERENT" in table.out
    assert "different: tp2" in table.out


def test_a_program_that_cannot_run_is_a_difference_too(run, monkeypatch):
    monkeypatch.setattr(compare, "run_cell", partial(compare.run_cell, inside=broken_program.unfit_head))
    result = run("verify", "Qwen/Qwen3-8B", "--tp-size", 2, "--format", "json")
    assert result.code == 1
    document = result.json()
    assert document["max_abs_difference"] is None  # there is no number
    assert "a shard of the wrong width" in document["first_mismatch"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("Qwen/Qwen3-8B", "--tp-size", 3), "[tp.heads]"),
        (("Qwen/Qwen3-8B", "--tp-size", 8, "--dcp-size", 4), "[dcp.kv_heads]"),
        (("Qwen/Qwen3-8B", "--num-mtp-tokens", 1), "[mtp.weights]"),
        (("deepseek-ai/DeepSeek-R1", "--tp-size", 4, "--ep-size", 2), "[ep.engine]"),
        (("no/such-model",), "no/such-model"),
        (("Qwen/Qwen3-8B", "--dtype", "float16"), "float32"),
        (("Qwen/Qwen3-8B", "--seed", "-1"), "at least 0"),
        (("Qwen/Qwen3-8B", "--dcp-semantics", "nope"), "vllm-ascend"),
    ],
)
def test_bad_input(run, arguments, message):
    result = run("verify", *arguments)
    assert result.code == 2
    assert message in result.err
    assert len(result.err.strip().splitlines()) == 1
    assert result.out == ""


def test_a_model_that_cannot_be_run_is_one_sentence(run, tmp_path):
    config = {
        "architectures": ["OtherForCausalLM"],
        "model_type": "other",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 256,
        "vocab_size": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run("verify", tmp_path)
    assert result.code == 2
    assert "knows no model_type" in result.err
    assert len(result.err.strip().splitlines()) == 1


def test_a_config_of_ones_own(run, tmp_path):
    """Biases, soft caps, windows, a vocabulary that needs padding: whatever a folder holds."""
    config = {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_size": 2304,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 9216,
        "vocab_size": 256003,
        "sliding_window": 4096,
        "attention_bias": True,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run("verify", tmp_path, "--tp-size", 2, "--format", "json")
    assert result.code == 0, result.json()["first_mismatch"]
    (layout,) = result.json()["layouts"]
    assert layout["shrunk"]["sliding_window"]["to"] == 4
    assert layout["shrunk"]["vocab_size"]["to"] == 66
    assert layout["shrunk"]["layer_types"]["to"] == ["sliding_attention", "full_attention"]


def test_plan_shows_every_layout_and_runs_nothing(run):
    result = run("verify", "Qwen/Qwen3-30B-A3B", "--plan")
    assert result.code == 0
    for what in ("one rank", "KV heads copied", "experts over ranks", "vllm-ascend", "rfc", "num_key_value_heads"):
        assert what in result.out
    only = run("verify", "Qwen/Qwen3-30B-A3B", "--plan", "--dcp-semantics", "rfc", "--format", "json").json()
    assert [x["what"] for x in only["layouts"] if "context" in x["what"]] == ["context split, rfc"]


def test_plan_needs_no_torch():
    code = (
        "import sys\nfrom cli.main import main\nmain(['verify', 'openai/gpt-oss-20b', '--plan'])\n"
        "print('HEAVY', sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "HEAVY []" in out


@pytest.mark.slow
@pytest.mark.parametrize("model", model_names())
def test_every_embedded_config_on_every_telling_layout(run, model):
    try:
        load_model_config(model)
    except UnsupportedModelError as error:
        pytest.skip(str(error))
    result = run("verify", model, "--format", "json")
    if result.code == 2 and "later version" in result.err:  # what cannot be traced yet either
        pytest.skip(result.err)
    document = result.json()
    assert document["first_mismatch"] is None
    assert result.code == 0
    assert len(document["layouts"]) >= 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("deepseek-ai/DeepSeek-R1", ("--tp-size", 16, "--dp-size", 4, "--ep-size", 64, "--dcp-size", 4)),
        ("deepseek-ai/DeepSeek-R1", ("--tp-size", 8, "--dcp-size", 8, "--cp-kv-cache-interleave-size", 64)),
        ("Qwen/Qwen3-235B-A22B", ("--tp-size", 8, "--dcp-size", 2, "--ep-size", 8)),
        ("Qwen/Qwen3-235B-A22B", ("--tp-size", 8, "--dp-size", 2, "--ep-size", 16)),
        ("meta-llama/Llama-3.1-70B", ("--tp-size", 16, "--dcp-size", 2)),
        ("mistralai/Mixtral-8x7B-v0.1", ("--tp-size", 2, "--dp-size", 4)),
    ],
    ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v)),
)
def test_layouts_as_they_are_served(run, model, options):
    document = run("verify", model, *options, "--format", "json").json()
    assert document["first_mismatch"] is None
