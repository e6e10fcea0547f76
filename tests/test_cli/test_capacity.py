"""``msmodeling capacity``: the JSON contract, tables, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]

LLAMA = ("capacity", "meta-llama/Llama-3.1-8B", "--device", "H100_SXM")


def test_json_of_one_stage(run: Run) -> None:
    result = run(*LLAMA, "--max-model-len", 8192, "--format", "json")
    assert result.code == 0, result.err
    document = result.json()
    (stage,) = document["stages"]
    # 8,030,261,248 parameters of two bytes; 32 layers * 8 heads * 256 elements * 2 B a token.
    assert stage["weights_gib"] == pytest.approx(8_030_261_248 * 2 / 2**30, rel=1e-6)
    assert (stage["bytes_per_token"], stage["bytes_per_block"]) == (131_072, 16 * 131_072)
    assert stage["kv_gib"] * 2**30 // stage["bytes_per_block"] == document["num_blocks"]
    assert document["kv_tokens"] == int(document["num_blocks"] / 512 * 8192)
    assert document["max_concurrency"] == document["num_blocks"] / 512
    assert (document["binding_stage"], document["unsafe_layers"]) == (0, [])
    # A published log (vLLM 0.19, H100, 0.95 of 79.19 GiB) leaves 58 to 62 GiB of 75.2 with 13 to 15 GiB of weights.
    assert 50 < stage["kv_gib"] < 58


def test_given_kv_memory(run: Run) -> None:
    document = run(
        "capacity", "meta-llama/Llama-3.1-70B", "--device", "H100_SXM", "--tp-size", 8, "--pp-size", 2,
        "--kv-memory-gib", "10,9", "--max-model-len", 131072, "--format", "json",
    ).json()  # fmt: skip
    assert (document["num_blocks"], document["kv_tokens"], document["binding_stage"]) == (29_491, 471_856, 1)
    assert [stage["num_blocks"] for stage in document["stages"]] == [32_768, 29_491]
    assert [stage["layers"] for stage in document["stages"]] == [40, 40]


def test_a_model_that_is_not_traced_needs_its_kv_memory(run: Run) -> None:
    asked = ("capacity", "Qwen/Qwen3-Next-80B-A3B-Instruct", "--device", "H200_SXM")
    refused = run(*asked)
    assert refused.code == 2
    assert "recurrent layers are not traced yet" in refused.err
    assert "--kv-memory-gib" in refused.err
    document = run(*asked, "--kv-memory-gib", 40, "--format", "json").json()
    assert document["stages"][0]["weights_gib"] is None
    assert (document["num_blocks"], document["kv_tokens"]) == (3212, 1_736_095)
    # K21: a block of attention has 544 tokens, to be no smaller than a state; 262,144 tokens take 482 of them.
    page = 544 * 2 * 512 * 2
    state, attention = document["kv_groups"][0], document["kv_groups"][-1]
    assert state["caches"] == [{"kind": "recurrent state", "layers": 12, "page_bytes": page}]
    assert attention == {
        "block_size": 544,
        "bytes_per_block": 12 * page,
        "blocks_per_request": 482,
        "caches": [{"kind": "full attention", "layers": 12, "page_bytes": page}],
    }
    table = run(*asked, "--kv-memory-gib", 40)
    assert table.code == 0
    for words in ("recurrent state", "12, 12, 12", "544", "1,114,112", "482"):
        assert words in table.out


def test_a_recurrent_model_is_refused_before_it_is_built(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensor_cast.core.trace_library import TraceLibrary

    monkeypatch.setattr(TraceLibrary, "compose", lambda *_: pytest.fail("traced"))
    asked = ("capacity", "Qwen/Qwen3-Next-80B-A3B-Instruct", "--device", "H200_SXM")
    assert run(*asked).code == 2
    assert run(*asked, "--kv-memory-gib", 40).code == 0


def test_groups_of_windowed_layers(run: Run) -> None:
    # K20: 52 windowed layers in six groups, 10 full ones in one; pages of 16 heads * 256 * 2 * 2 B * 16 tokens.
    asked = ("capacity", "google/gemma-3-27b-it", "--device", "H200_SXM", "--kv-memory-gib", 20)
    groups = run(*asked, "--format", "json").json()["kv_groups"]
    assert [group["caches"][0]["layers"] for group in groups] == [9, 9, 9, 9, 8, 8, 10]
    assert {(group["block_size"], group["caches"][0]["page_bytes"]) for group in groups} == {(16, 131_072)}
    assert [group["blocks_per_request"] for group in groups] == [1089] * 6 + [8192]
    assert "9, 9, 9, 9, 8, 8" in run(*asked).out


def test_one_group_of_latents_and_indexer_keys(run: Run) -> None:
    document = run(
        "capacity", "zai-org/GLM-5.3", "--device", "H200_SXM", "--tp-size", 8, "--num-mtp-tokens", 1,
        "--kv-cache-dtype", "fp8", "--kv-memory-gib", 20, "--format", "json",
    ).json()  # fmt: skip
    (group,) = document["kv_groups"]
    # 78 layers and the draft layer; 21 indexers and the draft layer's. 64 tokens of 656 and 132 bytes.
    assert group["caches"] == [
        {"kind": "latent", "layers": 79, "page_bytes": 64 * 656},
        {"kind": "indexer keys", "layers": 22, "page_bytes": 64 * 132},
    ]
    assert group["block_size"] == 64


DEEPSEEK = ("capacity", "deepseek-ai/DeepSeek-V3", "--device", "H100_SXM", "--tp-size", 8)


def test_given_memory_that_the_device_does_not_have(run: Run) -> None:
    # 79.53 GiB of weights on a device of 79.19: the user's word counts, and is called what it is.
    document = run(*DEEPSEEK, "--kv-memory-gib", 200, "--format", "json").json()
    assert document["fits"] is False
    assert document["num_blocks"] == 200 * 2**30 // (64 * 61 * 1152)
    (note,) = document["notes"]
    assert note == ("Does not fit: stage 0 needs weights 79.53 and KV memory 200.00 GiB, as given; a device has 79.19")
    assert note in run(*DEEPSEEK, "--kv-memory-gib", 200).out
    # 14.96 of 79.19 GiB are weights: 64 GiB of KV fit, 65 do not.
    fits = {gib: run(*LLAMA, "--kv-memory-gib", gib, "--format", "json").json()["fits"] for gib in (64, 65)}
    assert fits == {64: True, 65: False}


def test_nvfp4_of_a_latent(run: Run) -> None:
    # K2: 256 + 32 + 64 = 352 B of each of 61 layers; heads of K and V keep 144 B.
    document = run(*DEEPSEEK, "--kv-memory-gib", 1, "--kv-cache-dtype", "nvfp4", "--format", "json").json()
    assert document["inputs"]["kv_cache_dtype"] == "nvfp4_ds_mla"
    assert document["stages"][0]["bytes_per_token"] == 61 * 352
    heads = run(*LLAMA, "--kv-memory-gib", 9, "--kv-cache-dtype", "nvfp4", "--format", "json").json()
    assert heads["stages"][0]["bytes_per_token"] == 32 * 8 * (64 + 8) * 2


def test_tables_of_two_stages(run: Run) -> None:
    result = run(*LLAMA, "--pp-size", 2, "--pp-layer-partition", "auto", "--request-length", 4096)
    assert result.code == 0, result.err
    for words in (
        "KV cache size:",
        "Maximum concurrency for 131,072 tokens",
        "Partitions",
        "best",
        "engine's own",
        "16,16",
    ):
        assert words in result.out
    assert "resident in whole blocks" in result.out


def test_every_partition(run: Run) -> None:
    document = run(*LLAMA, "--pp-size", 2, "--pp-layer-partition", "all", "--format", "json").json()
    rows = document["partitions"]
    assert [row["partition"] for row in rows] == [[i, 32 - i] for i in range(1, 32)]
    best = max(rows, key=lambda row: row["num_blocks"])
    assert [row["partition"] for row in rows if "best" in row["note"]] == [best["partition"]]


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--pp-size", 2, "--pp-layer-partition", "20,20"), 2, "stages that add up to the model's 32 layers"),
        (("--pp-size", 2, "--pp-layer-partition", "31.0,1"), 2, "need integers separated by commas"),
        (("--pp-size", 2, "--kv-memory-gib", "1,2,3"), 2, "one for each of 2 stages; found 3"),
        (("--pp-size", 2, "--kv-memory-gib", "1", "--pp-layer-partition", "auto"), 2, "--calibrate-from"),
        (("--pp-size", 8, "--pp-layer-partition", "all"), 2, "can be listed; ask for the best one"),
        (("--pp-size", 2, "--kv-memory-gib", "1", "--pp-layer-partition", "all"), 2, "--calibrate-from"),
        (("--kv-memory-gib", "0.001"), 3, "given 0.001 GiB of KV memory, less than a block of 2,097,152 bytes"),
        (("--pp-size", 2, "--kv-memory-gib", "0,0"), 3, "stage 0 of partition 16,16 is given 0.000 GiB"),
        (("--kv-memory-gib", "1", "--block-size", 1000000), 3, "less than a block of 131,072,000,000 bytes; give more"),
        (("--block-size", 1000000), 3, "less than a block of 131,072,000,000 bytes; choose a smaller --block-size"),
        (("--kv-cache-dtype", "fp8_ds_mla"), 2, "stores latents"),
        (("--gpu-memory-utilization", "1.5"), 2, "gpu_memory_utilization: input should be less than or equal to 1"),
        (("--gpu-memory-utilization", "0.1"), 3, "no room for a KV cache: stage 0 of partition 32: of 7.92 GiB"),
        (("--calibrate-from", "/nowhere"), 2, "cannot read"),
        (("--tp-size", 3), 2, "num_attention_heads % tp_size"),
    ],
)
def test_refusals(run: Run, options: tuple[object, ...], code: int, message: str) -> None:
    result = run(*LLAMA, *options)
    assert result.code == code
    assert message in result.err
    assert result.err.count("\n") == 1


def test_sparse_layers_across_a_border(run: Run) -> None:
    asked = (
        "capacity",
        "zai-org/GLM-5.3",
        "--device",
        "H200_SXM",
        "--tp-size",
        8,
        "--pp-size",
        2,
        "--kv-memory-gib",
        20,
    )
    refused = run(*asked, "--pp-layer-partition", "39,39")
    assert refused.code == 2
    for words in ("39, 40, 41", "42,36", "38,40", "--dsa-split self-compute", "send-indices", "unsafe"):
        assert words in refused.err
    safe = run(*asked, "--pp-layer-partition", "42,36", "--format", "json")
    assert safe.json()["unsafe_layers"] == []


GLM = (
    "capacity", "zai-org/GLM-5.3-W4A16", "--device", "A800_80G_SXM", "--num-mtp-tokens", 3, "--kv-cache-dtype", "fp8",
    "--max-model-len", 524288, "--gpu-memory-utilization", 0.95,
)  # fmt: skip


@pytest.mark.parametrize(
    ("split", "own", "heading", "words"),
    [
        ("self-compute", [41], "own indexer", "Layers given an indexer of their own: 41"),
        ("send-indices", [], "indices sent", "Layers whose top-k indices are sent by the stage before: 41"),
        ("unsafe", [], "UNSAFE", "UNSAFE, outputs are wrong: layers that read top-k indices which nobody wrote: 41"),
    ],
)
def test_what_is_done_about_unsafe_layers(
    run: Run, tmp_path: Path, split: str, own: list[int], heading: str, words: str
) -> None:
    file = tmp_path / "memory.html"
    asked = (*GLM, "--tp-size", 4, "--pp-size", 2, "--pp-layer-partition", "41,37", "--dsa-split", split)
    document = run(*asked, "--format", "json", "--report", file).json()
    # The layers that the border parts from their indices, whatever is done; and what is done.
    assert document["unsafe_layers"] == [41]
    assert (document["own_indexer_layers"], document["dsa_split"], document["refused"]) == (own, split, False)
    assert document["notes"] == [words]
    own_row, *_ = [row for row in document["partitions"] if row["partition"] == [39, 39]]
    assert own_row["own_indexer_layers"] == ([39, 40, 41] if own else [])
    table, page = run(*asked).out, file.read_text()
    assert words in table
    assert words in page
    assert heading in table
    assert f">{heading}<" in page
    assert "unsafe layers" not in page


def test_every_partition_leads_with_a_safe_one(run: Run) -> None:
    asked = (*GLM, "--tp-size", 4, "--pp-size", 2, "--pp-layer-partition", "all")
    document = run(*asked, "--format", "json").json()
    # Of starts 0, 1, 2, 6, .., 74 the one with most blocks; the engine's 39,39 is refused.
    rows = {tuple(row["partition"]): row for row in document["partitions"]}
    best = max((row for row in rows.values() if not row["refused"]), key=lambda row: row["num_blocks"])
    assert document["partition"] == best["partition"] == [42, 36]
    assert (best["note"], rows[39, 39]["note"], rows[39, 39]["refused"]) == ("best", "engine's own", True)
    assert document["notes"] == [
        "The engine's own partition, 39,39, is refused without --dsa-split; this is the best safe one"
    ]


def test_safe_neighbours_with_most_room(run: Run) -> None:
    asked = (*GLM, "--tp-size", 2, "--pp-size", 4, "--dsa-split", "self-compute", "--format", "json")
    document = run(*asked, "--pp-layer-partition", "20,20,20,18").json()
    safe = {tuple(row["partition"]): row for row in document["partitions"] if "safe" in row["note"]}
    assert not any(row["unsafe_layers"] for row in safe.values())
    # Borders 20, 40, 60 move by 2 + 2 + 2 to 18, 38, 58 or 22, 42, 62 or any mix of those: eight partitions as near.
    near = {tuple(b - a for a, b in pairwise((0, *borders, 78))) for borders in product((18, 22), (38, 42), (58, 62))}
    tokens = {p: run(*asked, "--pp-layer-partition", ",".join(map(str, p))).json()["kv_tokens"] for p in near}
    # Several have the same room.
    assert set(safe) <= near
    assert sorted(tokens[p] for p in safe) == sorted(tokens.values())[-2:]
    assert safe[max(near, key=tokens.__getitem__)]["note"] == "best safe"


def test_calibration_is_shown(run: Run, tmp_path: Path) -> None:
    numbers = tmp_path / "start.yaml"
    numbers.write_text(
        "total_gib: 79.19\ngpu_memory_utilization: 0.9\nmax_model_len: 8192\n"
        "stages: [{weights_gib: 14.99, non_torch_gib: 0.25, activation_gib: 1.2, kv_gib: 54.83}]\n"
    )
    asked = (*LLAMA, "--max-model-len", 8192, "--gpu-memory-utilization", "0.9", "--calibrate-from", numbers)
    assert "residual" in run(*asked).out
    document = run(*asked, "--format", "json").json()
    (stage,) = document["calibration"]
    # 14.958 GiB of weights, and rotary tables of 131,072 positions: 131,072 * 128 * 2 B.
    assert stage["residual_gib"] == pytest.approx(14.99 + 0.25 - 14.958 - 0.03125, abs=0.001)
    # The same layout comes out as it was measured.
    assert document["stages"][0]["kv_gib"] == pytest.approx(54.83, abs=1e-6)


def test_report(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "memory.html"
    assert run(*LLAMA, "--pp-size", 2, "--report", file).code == 0
    page = file.read_text()
    for words in ("KV capacity of", "16,16: this one", "budget:", "KV idle", "Partitions", "<svg"):
        assert words in page
    assert "http" not in page.replace("http://www.w3.org", "")  # nothing is fetched
    failed = run(*LLAMA, "--report", tmp_path / "absent" / "memory.html")
    assert failed.code == 2
    assert "cannot write" in failed.err
