"""The command line as a whole: help, lists, errors, what it imports."""

import subprocess
import sys

import pytest

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
