"""``msmodeling trace``: the JSON contract and the DCP goldens, through the command line."""

import pytest

GOLDENS = [
    # (model, tp, dcp, semantics, op, bytes): bytes of the local input buffer for one token, one layer, one rank.
    # DeepSeek-R1: 16 local heads x 576 x 2 B; 128 gathered heads x (512 + 1) x 4 B; rfc: x (128 + 1) x 4 B.
    ("deepseek-ai/DeepSeek-R1", 8, 8, "vllm-ascend", "all_gather_into_tensor", 16 * 576 * 2),
    ("deepseek-ai/DeepSeek-R1", 8, 8, "vllm-ascend", "all_to_all_single", 128 * 513 * 4),
    ("deepseek-ai/DeepSeek-R1", 8, 8, "rfc", "all_to_all_single", 128 * 129 * 4),
    ("deepseek-ai/DeepSeek-R1", 8, 8, "vllm", "reduce_scatter_tensor", 128 * 512 * 2),
    # Qwen3-235B: 8 local heads x 128 x 2 B; 16 gathered heads x (128 + 1) x 4 B.
    ("Qwen/Qwen3-235B-A22B", 8, 2, "vllm-ascend", "all_gather_into_tensor", 8 * 128 * 2),
    ("Qwen/Qwen3-235B-A22B", 8, 2, "vllm-ascend", "all_to_all_single", 16 * 129 * 4),
    ("Qwen/Qwen3-235B-A22B", 8, 2, "rfc", "all_to_all_single", 16 * 129 * 4),
    ("Qwen/Qwen3-235B-A22B", 8, 2, "vllm", "reduce_scatter_tensor", 16 * 128 * 2),
]


def trace_json(run, model, *arguments):
    result = run("trace", model, *arguments, "--format", "json")
    assert result.code == 0, result.err
    return result.json()


@pytest.mark.parametrize(("model", "tp", "dcp", "semantics", "op", "size"), GOLDENS)
def test_dcp_collective_bytes(run, model, tp, dcp, semantics, op, size):
    sizes = ("--batch-size", 1, "--query-len", 1, "--context-len", 8192)
    document = trace_json(run, model, "--tp-size", tp, "--dcp-size", dcp, "--dcp-semantics", semantics, *sizes)
    assert document["symbols"] == []
    found = [o for o in document["ops"] if o["name"].endswith(op) and o["axis"] == "dcp"]
    assert size in {o["bytes"] for o in found}
    assert all(o["group_size"] == dcp for o in found)
    layers = {"deepseek-ai/DeepSeek-R1": 61, "Qwen/Qwen3-235B-A22B": 94}[model]
    assert sum(o["repeat"] for o in found if o["bytes"] == size) == layers


def test_json_contract(run):
    document = trace_json(run, "Qwen/Qwen3-8B", "--tp-size", 2)
    assert set(document) >= {"symbols", "ops", "coverage"}
    assert document["symbols"] == ["B", "Q", "S"]
    assert document["coverage"] == 1.0
    for op in document["ops"]:
        assert set(op) == {"name", "module", "repeat", "inputs", "outputs", "axis", "group_size", "bytes"}
        assert (op["axis"] is None) == (op["group_size"] is None) == (op["bytes"] is None)
        for tensor in op["inputs"] + op["outputs"]:
            assert set(tensor) == {"shape", "dtype"}
            assert all(isinstance(d, int | str) for d in tensor["shape"])


def test_some_sizes_given_others_stay_symbols(run):
    document = trace_json(run, "Qwen/Qwen3-8B", "--batch-size", 4, "--query-len", 1)
    assert document["symbols"] == ["S"]


def test_symbolic_bytes_are_expressions(run):
    document = trace_json(run, "Qwen/Qwen3-8B", "--tp-size", 2)
    reduces = [o for o in document["ops"] if o["name"].endswith("all_reduce")]
    # Two all_reduces a layer of [B, Q, 4096] bf16, and one after the vocabulary-parallel embedding.
    assert sum(o["repeat"] for o in reduces) == 2 * 36 + 1
    assert {o["bytes"] for o in reduces} == {"8192*B*Q"}


def test_fresh_prompt_has_no_context_symbol(run):
    document = trace_json(run, "Qwen/Qwen3-8B", "--phase", "prefill", "--context-len", 0)
    assert document["symbols"] == ["B", "Q"]


def test_fusion_can_be_turned_off(run):
    fused = trace_json(run, "Qwen/Qwen3-8B")
    eager = trace_json(run, "Qwen/Qwen3-8B", "--no-fusion")
    assert len(eager["ops"]) > len(fused["ops"])
    assert sum(o["name"] == "aten.linear" for o in eager["ops"]) == sum(
        o["name"] == "aten.linear" for o in fused["ops"]
    )


def test_table(run):
    result = run("trace", "Qwen/Qwen3-8B", "--tp-size", 2)
    assert result.code == 0
    assert "model.layers.0.self_attn" in result.out
    assert "coverage 100.0%" in result.out
