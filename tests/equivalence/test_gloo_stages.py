"""Stages as processes over gloo, with slices on the wire, equal Transformers' whole model step by step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from families import family

from tensor_cast.proof.pipeline import PipelineJob, run_pipeline
from tensor_cast.proof.reference import whole_model

CASES = [
    ("llama", 1, (1, 1)),
    ("qwen3_moe", 2, (1, 1)),
    ("deepseek_v3", 2, (1, 1, 1)),
    ("gpt_oss", 2, (1, 2)),
    ("glm_moe_dsa", 2, (2, 2)),  # the second stage starts with a layer that chooses tokens itself
]


@pytest.mark.parametrize(("name", "tp", "partition"), CASES, ids=[f"{n}-tp{t}-{p}" for n, t, p in CASES])
def test_pipeline_equals_transformers(name: str, tp: int, partition: tuple[int, ...]) -> None:
    job = PipelineJob(family(name), tp, partition)
    ranks = run_pipeline(job)
    theirs = whole_model(job.config, job.seed, False)
    tokens = job.prompts()
    last = (len(partition) - 1) * tp
    with torch.inference_mode():
        for number in range(1 + job.steps):
            whole = theirs(input_ids=tokens, use_cache=False).logits
            for rank in range(last, job.ranks):
                got = ranks[rank][0][number]
                np.testing.assert_allclose(got, whole[:, -got.shape[1] :].numpy(), rtol=1e-5, atol=3e-5)
            sampled = whole[:, -1:].argmax(-1)
            # What the last stage sampled is on every rank, and what the first one embedded in the next step.
            for _, sent in ranks:
                np.testing.assert_array_equal(sent[:, number : number + 1], sampled.numpy())
            tokens = torch.cat([tokens, sampled], dim=1)
    assert all(not logits for logits, _ in ranks[:last])
