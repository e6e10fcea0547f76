"""Stages as processes over gloo, with slices on the wire, equal Transformers' whole model step by step."""

from __future__ import annotations

from dataclasses import replace

import faults
import numpy as np
import pytest
from families import family

from tensor_cast.core.trace_library import TraceLibrary
from tensor_cast.errors import LegalityError
from tensor_cast.ir.index_sharing import hand_over
from tensor_cast.ir.record import Phase
from tensor_cast.ir.stages import RECV, stage_traces
from tensor_cast.model_config import ModelConfig, ParallelConfig
from tensor_cast.pipeline_partition import DsaSplit, unsafe_layers
from tensor_cast.proof.compare import TOLERANCE
from tensor_cast.proof.pipeline import PipelineJob, largest_difference, run_pipeline


def prove(job: PipelineJob) -> None:
    """Logits of the last stage are Transformers', every rank gets what it samples, and each byte sent is counted."""
    runs = run_pipeline(job)
    assert max(largest_difference(job, runs)) < TOLERANCE
    last = (len(job.partition) - 1) * job.tp
    best = np.stack([logits[:, -1].argmax(-1) for logits in runs[last].logits], axis=1)
    for rank, run in enumerate(runs):
        np.testing.assert_array_equal(run.sampled, best)
        assert len(run.logits) == (1 + job.steps if rank >= last else 0)
        tokens = [job.batch * queries for queries in (job.prompt, *[1] * job.steps)] if rank < last else []
        assert run.sent == [n * bytes_per_token(job, rank // job.tp) for n in tokens]


def bytes_per_token(job: PipelineJob, stage: int) -> int:
    """What a rank sends for a token: 1/tp of hidden states and residual in float64, of K indices in int32."""
    start = sum(job.partition[: stage + 1])  # the layer that the next stage begins with
    lacks = job.dsa_split is DsaSplit.SEND_INDICES and not job.model.indexer_layers[start]
    indices = 4 * TOPK if lacks else 0
    return (2 * 8 * job.model.hidden_size + indices) // job.tp


CASES = [
    ("llama", 1, (1, 1)),
    ("qwen3_moe", 2, (1, 1)),
    ("deepseek_v3", 2, (1, 1, 1)),
    ("gpt_oss", 2, (1, 2)),
    ("deepseek_v32", 2, (1, 1, 1)),  # every layer chooses tokens itself
    ("glm_moe_dsa", 2, (2, 2)),  # the second stage starts with a layer that chooses tokens itself
]


@pytest.mark.parametrize(("name", "tp", "partition"), CASES, ids=[f"{n}-tp{t}-{p}" for n, t, p in CASES])
def test_pipeline_equals_transformers(name: str, tp: int, partition: tuple[int, ...]) -> None:
    prove(PipelineJob(family(name), tp, partition))


# -- sparse attention whose layers share what one of them chose -------------------------------------------------------

TOPK = 6


def sharing(kinds: str) -> ModelConfig:
    """The tiny GLM with layers that choose (F) or share (S)."""
    model = replace(family("glm_moe_dsa"), indexer_layers=tuple(kind == "F" for kind in kinds))
    assert model.num_hidden_layers == len(kinds)
    return model


#: Layers, layers of each stage, and those whose choice was made on an earlier stage.
SPLITS = [
    ("FSFS", (1, 3), (1,)),
    ("FSFS", (3, 1), (3,)),
    ("FSFS", (1, 2, 1), (1, 3)),
    ("FSFS", (1, 1, 2), (1,)),  # the second boundary needs no indices
    ("FSSF", (1, 1, 2), (1, 2)),  # the stage in the middle hands on what it was sent
]
SPLIT_IDS = [f"{kinds}-{partition}" for kinds, partition, _ in SPLITS]


@pytest.mark.parametrize("split", [DsaSplit.SEND_INDICES, DsaSplit.SELF_COMPUTE])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("kinds", "partition", "unsafe"), SPLITS, ids=SPLIT_IDS)
def test_shared_choice_over_stages(
    kinds: str, partition: tuple[int, ...], unsafe: tuple[int, ...], tp: int, split: DsaSplit
) -> None:
    """Nine tokens of prompt, of which six are chosen, and three decode steps.

    Under ``self-compute`` Transformers' model is the one whose unsafe layers are of type ``full``, with the indexers'
    weights that this takes.
    """
    job = PipelineJob(sharing(kinds), tp, partition, split)
    assert unsafe_layers(partition, job.model.indexer_layers) == unsafe
    own = [layer for layer, chooses in enumerate(job.config.indexer_layers) if chooses]
    flipped = unsafe if split is DsaSplit.SELF_COMPUTE else ()
    assert own == sorted([*(i for i, kind in enumerate(kinds) if kind == "F"), *flipped])
    prove(job)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("kinds", "partition"), [(kinds, partition) for kinds, partition, _ in SPLITS], ids=SPLIT_IDS)
def test_what_is_sent_is_what_is_priced(kinds: str, partition: tuple[int, ...], tp: int) -> None:
    """Each stage waits in its trace for the bytes that :func:`prove` counts."""
    job = PipelineJob(sharing(kinds), tp, partition, DsaSplit.SEND_INDICES)
    trace = TraceLibrary(job.model, use_cache=False).trace(
        ParallelConfig(tp), Phase.DECODE, dcp_semantics="vllm", block_size=4
    )
    handover = hand_over(job.model, partition, job.dsa_split)
    size = job.model.hidden_size
    stages = stage_traces(trace, partition, hidden_size=size, dtype="float64", tp=tp, handover=handover)
    for number, stage in enumerate(stages):
        received = [op.collective_bytes({"B": 3, "Q": 2}) for op in stage.ops if op.name == RECV]
        assert received == ([6 * bytes_per_token(job, number - 1)] if number else [])


def test_context_shorter_than_the_choice() -> None:
    """Three tokens, then more than six: rows of indices stay six wide on the wire, and what is no token is not read."""
    prove(PipelineJob(sharing("FSFS"), 2, (1, 3), DsaSplit.SEND_INDICES, prompt=3, steps=5))


@pytest.mark.parametrize(("kinds", "partition", "unsafe"), SPLITS, ids=SPLIT_IDS)
def test_unsafe_differs(kinds: str, partition: tuple[int, ...], unsafe: tuple[int, ...]) -> None:
    """As engines run it: the choice of another stage never arrives, and every step's logits are wrong."""
    job = PipelineJob(sharing(kinds), 1, partition, DsaSplit.UNSAFE)
    assert min(largest_difference(job, run_pipeline(job))) > 1e4 * TOLERANCE


def test_unsafe_is_safe_where_no_layer_lacks_indices() -> None:
    prove(PipelineJob(sharing("FSFS"), 1, (2, 2), DsaSplit.UNSAFE))


def test_a_split_that_lacks_indices_is_refused() -> None:
    with pytest.raises(LegalityError, match="layer 1 would read indices never written"):
        run_pipeline(PipelineJob(sharing("FSFS"), 1, (1, 3)))


FAULTS = [faults.indices_one_too_high, faults.indices_of_other_request, faults.first_slice_sent_by_all]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_mistakes_at_the_boundary_show(fault: object) -> None:
    job = PipelineJob(sharing("FSFS"), 2, (1, 3), DsaSplit.SEND_INDICES, inside=fault)
    assert min(largest_difference(job, run_pipeline(job))) > 1e4 * TOLERANCE
