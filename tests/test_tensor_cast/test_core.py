"""Core: user configuration, inputs of a step against what is traced, the Python API."""

import pytest

import tensor_cast
from tensor_cast.core.input_generator import InputGenerator
from tensor_cast.core.user_config import UserInputConfig
from tensor_cast.errors import ConfigError, LegalityError, UnknownNameError
from tensor_cast.ir.record import Phase
from tensor_cast.model_catalog import load_model_config
from tensor_cast.model_config import ParallelConfig


@pytest.mark.parametrize(
    ("model", "tp", "dcp", "query"),
    [
        ("Qwen/Qwen3-8B", 2, 1, 1),
        ("Qwen/Qwen3-235B-A22B", 8, 2, 1),
        ("Qwen/Qwen3-235B-A22B", 8, 2, 3),
        ("deepseek-ai/DeepSeek-R1", 8, 1, 2),
        ("deepseek-ai/DeepSeek-R1", 8, 8, 2),
    ],
)
def test_inputs_have_the_shapes_of_the_trace(model, tp, dcp, query):
    """Class A of the RFC, worked out once by the input generator and once by the traced program."""
    batch, context, block = 3, 5000, 128
    parallel = ParallelConfig(tensor_parallel_size=tp, decode_context_parallel_size=dcp)
    generator = InputGenerator(load_model_config(model), parallel, dcp_semantics="vllm-ascend", block_size=block)
    info = generator._get_kv_cache_info(batch, query, context)
    assert info.logical_block_size == block * dcp
    assert info.blocks_per_request == -(-context // (block * dcp))
    view = tensor_cast.trace(
        model,
        tp_size=tp,
        dcp_size=dcp,
        dcp_semantics="vllm-ascend",
        block_size=block,
        batch_size=batch,
        query_len=query,
        context_len=context,
    )
    gather = next(op for op in view.ops if op.name == "tensor_cast.gather_kv")
    assert gather.inputs[0].shape == info.kv_cache_shape
    assert gather.inputs[1].shape == info.block_table_shape
    write = next(op for op in view.ops if op.name.endswith(("reshape_and_cache", "mla_cache_write")))
    assert write.inputs[-1].shape == info.slot_mapping_shape
    assert write.inputs[-1].dtype == "int32"
    # Keys and values of a rank: S / dcp tokens (class B).
    assert {spec.shape[1] for spec in gather.outputs} == {-(-context // dcp)}


def test_sizes_of_a_step():
    def sizes(**values):
        return UserInputConfig(model="m", **values).get_sizes()

    assert sizes(context_length=100) == {"B": 1, "Q": 1, "S": 100}
    assert sizes(context_length=100, num_mtp_tokens=2) == {"B": 1, "Q": 3, "S": 100}
    assert sizes(phase=Phase.PREFILL, query_length=7, num_queries=4) == {"B": 4, "Q": 7, "S": 7}
    assert sizes(phase=Phase.PREFILL, query_length=7, context_length=20) == {"B": 1, "Q": 7, "S": 20}
    assert sizes(phase=Phase.PREFILL, context_length=20) == {"B": 1, "Q": 20, "S": 20}
    with pytest.raises(ConfigError, match="shorter than query length 7"):
        sizes(query_length=7, context_length=5)


def test_prefill_runs_without_dcp():
    config = UserInputConfig(model="m", tp_size=8, dcp_size=8, phase=Phase.PREFILL)
    assert config.get_parallel_config().decode_context_parallel_size == 1
    assert config.model_copy(update={"phase": Phase.DECODE}).get_parallel_config().decode_context_parallel_size == 8


def test_bad_values_are_named():
    with pytest.raises(ConfigError, match=r"tp_size.*found 0"):
        UserInputConfig.create(model="m", tp_size=0)
    with pytest.raises(ConfigError, match="tq_size"):
        UserInputConfig.create(model="m", tq_size=2)


def test_defaults_follow_device_and_engine():
    model = load_model_config("deepseek-ai/DeepSeek-R1")
    nobody = UserInputConfig(model="m")
    ascend = UserInputConfig(model="m", device="ATLAS_800_A3_752T_128G_DIE")
    nvidia = UserInputConfig(model="m", device="h100_sxm")
    assert [c.get_engine().name for c in (nobody, ascend, nvidia)] == ["vllm-ascend", "vllm-ascend", "vllm"]
    assert [c.get_dcp_semantics() for c in (nobody, nvidia)] == ["vllm-ascend", "vllm"]
    assert [c.get_block_size(model) for c in (nobody, nvidia)] == [128, 64]
    assert nvidia.model_copy(update={"dcp_semantics": "rfc", "block_size": 32}).get_block_size(model) == 32


def test_python_api_prices_a_step():
    result = tensor_cast.estimate("Qwen/Qwen3-8B", device="H100_SXM", num_queries=8, context_length=1024)
    assert result.step_s > 16.4e9 / 3.35e12  # reading the weights alone
    assert result.kv_cache_size_gb == pytest.approx(8 * 1024 * 36 * 8 * 256 * 2 / 2**30)


def test_python_api_raises_the_errors_of_the_tree():
    with pytest.raises(UnknownNameError, match="H100_SXM"):
        tensor_cast.estimate("Qwen/Qwen3-8B", device="H100SXM", context_length=16)
    with pytest.raises(ConfigError, match="--device"):
        tensor_cast.estimate("Qwen/Qwen3-8B", context_length=16)
    with pytest.raises(LegalityError, match="dcp"):
        tensor_cast.trace("Qwen/Qwen3-8B", tp_size=2, dcp_size=2)
