"""The command line as a whole: help, lists, errors, what it imports."""

import subprocess
import sys

import pytest

from tensor_cast.config_files import config_root

COMMANDS = ("throughput_optimizer", "text_generate", "trace", "verify", "devices", "models")


def test_help_names_every_command(run):
    result = run("--help")
    assert result.code == 0
    for command in COMMANDS:
        assert command in result.out


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(run, command):
    result = run(command, "--help")
    assert result.code == 0
    assert "usage: msmodeling" in result.out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_nothing_heavy(command):
    code = (
        "import sys\nfrom cli.main import main\n"
        f"try: main([{command!r}, '--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'rich', 'networkx', 'sympy'} & set(sys.modules)\n"
        "print('HEAVY', sorted(heavy))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "HEAVY []" in out


def test_no_command_prints_help_and_fails(run):
    result = run()
    assert result.code == 2
    assert "COMMAND" in result.out


def test_version(run):
    result = run("--version")
    assert result.code == 0
    assert result.out.startswith("msmodeling ")


def test_devices_table_and_json(run):
    table = run("devices")
    assert table.code == 0
    assert "H200_SXM" in table.out
    assert "ATLAS_800_A3_752T_128G_DIE" in table.out
    assert "\x1b" not in table.out  # piped: no escape codes
    by_name = {d["name"]: d for d in run("devices", "--format", "json").json()}
    assert by_name["H100_SXM"]["peak_flops"]["bfloat16"]["value"] == 989e12
    assert by_name["H100_SXM"]["peak_flops"]["bfloat16"]["source"]


def test_models_table_and_json(run):
    assert "deepseek-ai/DeepSeek-R1" in run("models").out
    by_name = {m["model"]: m for m in run("models", "--format", "json").json()}
    assert by_name["deepseek-ai/DeepSeek-R1"]["attention"] == "mla"
    assert by_name["Qwen/Qwen3-235B-A22B"]["kv_heads"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("trace", "Qwen/Qwen3-9B"), "Qwen/Qwen3-8B"),
        (("trace", "no/such-model"), "no/such-model"),
        (("trace", "Qwen/Qwen3-8B", "--tp-size", "0"), "at least 1"),
        (("trace", "Qwen/Qwen3-8B", "--tp-size", "x"), "integer"),
        (("trace", "Qwen/Qwen3-8B", "--tp-size", "3"), "tp."),
        (("trace", "Qwen/Qwen3-8B", "--tp-size", "8", "--dcp-size", "4"), "dcp."),
        (("trace", "Qwen/Qwen3-8B", "--ep-size", "2"), "ep."),
        (("trace", "Qwen/Qwen3-8B", "--dcp-semantics", "nope"), "vllm-ascend"),
        (("trace", "Qwen/Qwen3-8B", "--quantize-linear-action", "W3A3"), "W8A8_DYNAMIC"),
        (("trace", "Qwen/Qwen3-8B", "--query-len", "8", "--context-len", "4"), "context length 4"),
        (("text_generate", "Qwen/Qwen3-8B", "--device", "H200", "--decode"), "H200_SXM"),
        (("text_generate", "Qwen/Qwen3-8B", "--device", "H200_SXM"), "length"),
        (("text_generate", "Qwen/Qwen3-8B", "--device", "H200_SXM", "--decode", "--num-mtp-tokens", "1"), "mtp"),
        (("text_generate", "Qwen/Qwen3-8B", "--device", "H200_SXM", "--decode", "--reserved-memory-gb", "-1"), "-1"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(run, arguments, message):
    result = run(*arguments)
    assert result.code == 2
    assert result.out == ""
    assert message.casefold() in result.err.casefold()
    assert "Traceback" not in result.err
    if "usage:" not in result.err:
        assert len(result.err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("capacity", "m", "--device", "d", "--quantize-attention-action", "FP8"), "did you mean --kv-cache-dtype for"),
        (("text_generate", "m", "--device", "d", "--kv-cache-dtype=fp8"), "did you mean --quantize-attention-action"),
        (("trace", "m", "--tensor-parallel-size", "2"), "did you mean --tp-size for --tensor-parallel-size"),
        (("capacity", "m", "--device", "d", "--tp-sizes", "2"), "did you mean --tp-size for --tp-sizes"),
        (("trace", "m", "--block_size", "2"), "did you mean --block-size for --block_size"),
    ],
)
def test_an_option_that_goes_by_another_name_is_suggested(run, arguments, says):
    result = run(*arguments)
    assert result.code == 2
    assert says in result.err


def test_an_option_that_nothing_comes_near_is_left_alone(run):
    assert "did you mean" not in run("trace", "m", "--zebra", "2").err


def test_both_spellings_are_the_same_option(run):
    json = ("--format", "json")
    trace = ("trace", "Qwen/Qwen3-8B", *json)
    one = run(*trace, "--batch-size", 2, "--query-len", 1, "--context-len", 64).json()
    assert run(*trace, "--num-queries", 2, "--query-length", 1, "--context-length", 64).json() == one
    step = ("text_generate", "Qwen/Qwen3-8B", "--device", "H100_SXM", "--decode", *json)
    one = run(*step, "--num-queries", 2, "--query-length", 1, "--context-length", 64).json()
    assert run(*step, "--batch-size", 2, "--query-len", 1, "--context-len", 64).json() == one
    rank = ("capacity", "Qwen/Qwen3-8B", "--device", "H100_SXM", *json)
    assert (
        run(*rank, "--max-batched-tokens", 1024).json()["inputs"]["max_num_batched_tokens"]
        == run(*rank, "--max-num-batched-tokens", 1024).json()["inputs"]["max_num_batched_tokens"]
        == 1024
    )


@pytest.mark.parametrize("command", ["capacity", "text_generate"])
def test_the_topology_may_be_an_option(run, command):
    words = (command, "Qwen/Qwen3-8B", "--tp-size", 2, *(("--decode",) if command == "text_generate" else ()))
    option = run(*words, "--device", "A100_80G_PCIE", "--topology", "nvlink_pairs")
    assert option.code == 0, option.err
    assert option.out == run(*words, "--device", "A100_80G_PCIE@nvlink_pairs").out
    assert option.out != run(*words, "--device", "A100_80G_PCIE").out
    twice = run(*words, "--device", "A100_80G_PCIE@nvlink_pairs", "--topology", "other")
    assert "names a topology already; leave out --topology other" in twice.err
    assert "nvlink_pairs" in run("devices").out


def test_one_bad_device_file_does_not_hide_the_others(run, monkeypatch, tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text("name: BAD\n")
    good = config_root() / "devices" / "h100_sxm.yaml"
    monkeypatch.setattr("tensor_cast.device.catalog.yaml_names", lambda kind: {"bad": bad, "h100_sxm": good})
    result = run("devices")
    assert result.code == 0
    assert "H100_SXM" in result.out
    assert result.err.startswith(f"warning: left out: {bad}: fields vendor, description, memory_bytes,")
    asked = run("text_generate", "Qwen/Qwen3-8B", "--device", "BAD", "--decode")
    assert asked.code == 2
    assert str(bad) in asked.err


def test_a_request_beyond_the_positions_is_noted(run):
    rank = ("capacity", "Qwen/Qwen3-8B", "--device", "H100_SXM", "--max-model-len")
    note = "A request of 40,961 tokens is longer than the model's max_position_embeddings 40,960"
    assert note in run(*rank, 40961).out
    assert "max_position_embeddings" not in run(*rank, 40960).out
    assert run(*rank, 40961, "--format", "json").json()["notes"] == [note]
