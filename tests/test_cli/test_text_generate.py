"""``msmodeling text_generate``: the JSON contract, sums that must hold, the Chrome trace."""

import json
from itertools import pairwise

import pytest

FIELDS = {
    "step_ms",
    "weights_gib",
    "kv_cache_size_gb",
    "activation_gib",
    "step_activation_gib",
    "memory_total_gib",
    "coverage",
    "ops",
    "layers",
}
POINT = ("--num-queries", 64, "--context-length", 4096, "--decode")


def price(run, model, *arguments, device="H200_SXM"):
    result = run("text_generate", model, "--device", device, *arguments, "--format", "json")
    assert result.code == 0, result.err
    return result.json()


def test_json_contract_and_sums(run):
    document = price(run, "Qwen/Qwen3-8B", *POINT)
    assert set(document) >= FIELDS
    device = sum(op["ms"] for op in document["ops"])
    assert document["step_ms"] == pytest.approx(device + document["host_ms"])
    assert sum(layer["ms"] for layer in document["layers"]) == pytest.approx(device)
    assert sum(layer["count"] for layer in document["layers"] if layer["name"] != "outside") == 36
    assert document["coverage"] == 1.0


def test_weights_are_the_parameters(run):
    # Qwen3-8B from its config: embedding and head 151936 x 4096 each, 36 layers of q, k, v, o, two head norms,
    # three MLP matrices and two norms, one final norm; two bytes each.
    layer = 4096 * 4096 * 2 + 2 * 4096 * 1024 + 2 * 128 + 3 * 4096 * 12288 + 2 * 4096
    total = 2 * (2 * 151936 * 4096 + 36 * layer + 4096)
    assert price(run, "Qwen/Qwen3-8B", *POINT)["weights_gib"] * 2**30 == pytest.approx(total, abs=1)


def test_kv_of_the_batch(run):
    # 36 layers x 8 KV heads x (128 + 128) x 2 B a token; 4096 is a multiple of every block size.
    want = 64 * 4096 * 36 * 8 * 256 * 2 / 2**30
    assert price(run, "Qwen/Qwen3-8B", *POINT)["kv_cache_size_gb"] == pytest.approx(want)


@pytest.mark.parametrize("dcp", [2, 4, 8])
@pytest.mark.parametrize("device", ["H200_SXM", "ATLAS_800_A3_752T_128G_DIE"])
def test_dcp_divides_the_kv_cache(run, dcp, device):
    point = ("--num-queries", 8, "--context-length", 8192, "--decode", "--tp-size", 8)
    whole = price(run, "deepseek-ai/DeepSeek-R1", *point, *quant(device), device=device)
    split = price(run, "deepseek-ai/DeepSeek-R1", *point, "--dcp-size", dcp, *quant(device), device=device)
    assert split["kv_cache_size_gb"] == pytest.approx(whole["kv_cache_size_gb"] / dcp, rel=0.005)


def quant(device):
    # The config's fp8 blocks need fp8 units, which this Ascend die lacks.
    return ("--quantize-linear-action", "W8A8_DYNAMIC") if device.startswith("ATLAS") else ()


def test_a_dtype_without_a_rate_is_refused(run):
    result = run(
        "text_generate", "deepseek-ai/DeepSeek-R1", "--device", "ATLAS_800_A3_752T_128G_DIE", "--tp-size", 16, *POINT
    )
    assert result.code == 2
    assert "float8_e4m3fn" in result.err
    assert "W8A8" in result.err or "int8" in result.err


def test_prefill_of_a_fresh_prompt(run):
    document = price(run, "Qwen/Qwen3-8B", "--query-length", 2048)
    assert document["inputs"]["context_length"] == 2048
    assert document["step_ms"] > 10  # 8.2e9 parameters x 2 x 2048 tokens at 989 TFLOP/s take 34 ms at the very least
    assert document["step_ms"] > 2 * 7.5e9 * 2048 / 989e12 * 1e3


def test_chrome_trace_adds_up(run, tmp_path):
    path = tmp_path / "step.json"
    document = price(run, "Qwen/Qwen3-8B", *POINT, "--tp-size", 2, "--chrome-trace-file", path)
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    assert sum(e["dur"] for e in events) / 1e3 == pytest.approx(sum(op["ms"] for op in document["ops"]))
    assert len(events) == sum(op["repeat"] for op in document["ops"])
    assert all(a["ts"] + a["dur"] == pytest.approx(b["ts"]) for a, b in pairwise(events))
    assert {e["tid"] for e in events} == {0, 1}
    assert [p.name for p in tmp_path.iterdir()] == ["step.json"]


def test_chrome_trace_into_a_missing_folder(run, tmp_path):
    result = run(
        "text_generate", "Qwen/Qwen3-8B", "--device", "H200_SXM", *POINT, "--chrome-trace-file", tmp_path / "no" / "f"
    )
    assert result.code == 2
    assert "cannot write" in result.err


def test_no_fusion_is_not_faster(run):
    fused = price(run, "Qwen/Qwen3-8B", *POINT)
    eager = price(run, "Qwen/Qwen3-8B", *POINT, "--no-fusion")
    assert eager["step_ms"] > fused["step_ms"]


def test_table(run):
    result = run("text_generate", "Qwen/Qwen3-8B", "--device", "H200_SXM", *POINT)
    assert result.code == 0
    assert "Time by op" in result.out
    assert "\x1b" not in result.out


def test_a_step_that_does_not_fit_is_priced_with_a_warning(run):
    result = run("text_generate", "deepseek-ai/DeepSeek-R1", "--device", "H200_SXM", *POINT, "--format", "json")
    assert result.code == 0
    assert result.json()["fits"] is False
    assert result.json()["memory_total_gib"] > result.json()["memory_available_gib"]
    assert result.err.startswith("warning: does not fit: one rank needs")


def test_a_context_beyond_the_model_is_warned_of(run):
    result = run("text_generate", "Qwen/Qwen3-8B", "--device", "H200_SXM", "--context-length", 50000, "--decode")
    assert "exceeds the model's max_position_embeddings 40960" in result.err


@pytest.mark.parametrize(
    "layout",
    [
        ("Qwen/Qwen3-8B", "--tp-size", 2),
        ("Qwen/Qwen3-8B", "--pp-size", 2),
        ("deepseek-ai/DeepSeek-V3.2", "--tp-size", 8, "--ep-size", 8, "--num-mtp-tokens", 1),
    ],
)
@pytest.mark.parametrize("step", [("--decode",), ("--query-length", 64)])
def test_room_for_the_cache_is_that_of_capacity(run, layout, step):
    """What a step may fill with KV is what the engine found at start-up, however few activations the step needs."""
    words = (*layout, "--device", "H200_SXM", "--format", "json")
    found = run("text_generate", *words, *step, "--context-length", 4096).json()
    planned = run("capacity", *words, "--max-model-len", 4096).json()
    stages = found["pipeline"]["stages"] if found["pipeline"] else [found]
    for stage, plan in zip(stages, planned["stages"], strict=True):
        room = found["memory_available_gib"] - stage["memory_total_gib"] + stage["kv_cache_size_gb"]
        assert room == pytest.approx(plan["kv_gib"], abs=1e-6)
    assert found["step_activation_gib"] < found["activation_gib"]


def test_a_long_prefill_needs_more_than_the_profile_run(run):
    words = ("text_generate", "Qwen/Qwen3-8B", "--device", "H200_SXM", "--format", "json", "--query-length")
    # Twenty times the token budget of a step, in one.
    found = run(*words, 40_960, "--num-queries", 4).json()
    assert found["activation_gib"] == found["step_activation_gib"] > run(*words, 64).json()["activation_gib"]
