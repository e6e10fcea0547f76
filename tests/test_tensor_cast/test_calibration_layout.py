"""Of which run a log is: its parallel sizes, its starts, and logs of which neither can be told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from start_logs import GLM_CONFIG, GLM_STAGES, LLAMA_LOG, QWEN_LOG, account, glm_log, sglang_log, worker

from tensor_cast.core.calibration import Calibration, GivenLayout, read_calibration
from tensor_cast.errors import ConfigError

Read = Callable[..., Calibration]

#: The run before, with half a GiB more of everything: 51.48 + 2.36 + 21.45 and 57.03 + 3.20 + 15.06 are 75.29 too.
EARLIER = {0: (51.48, 2.36, 0.76, 21.45), 1: (57.03, 3.20, 1.49, 15.06)}


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """``read(lines)`` -> what a log of them says."""

    def read_lines(lines: Sequence[str], **given: object) -> Calibration:
        file = tmp_path / "start.log"
        file.write_text("\n".join(lines) + "\n")
        return read_calibration(file, GivenLayout(**given))  # type: ignore[arg-type]

    return read_lines


def layout(found: Calibration) -> tuple[int | None, int | None, int | None]:
    return found.tp_size, found.pp_size, found.dp_size


# -- layouts -----------------------------------------------------------------------------------------------------------


def test_names_of_ranks_tell_the_layout(read: Read) -> None:
    assert layout(read(glm_log(config=False))) == layout(read(glm_log())) == (4, 2, 1)
    assert layout(read(QWEN_LOG)) == (4, 1, 1)  # (Worker_TP3 ...)
    assert layout(read(LLAMA_LOG)) == (1, 1, 1)  # the engine runs its only worker itself
    assert layout(read([worker("_PP0") + account(5, 1, 0, 69.29), worker("_PP1") + account(5, 1, 0, 69.29)])) == (
        1,
        2,
        1,
    )


def test_an_axis_has_as_many_ranks_as_its_highest_says(read: Read) -> None:
    lines = [worker(f"_DP{dp}_TP{tp}_EP{dp * 2 + tp}") + account(5, 1, 0, 69.29) for dp in range(3) for tp in range(2)]
    found = read(lines)
    assert layout(found) == (2, 1, 3)
    assert found.expert_parallel


def test_old_names_are_numbers_over_all_ranks(read: Read) -> None:
    # Rank order is pp, tp with tp fastest: ranks 0 and 1 of four are the first of two stages.
    def lines(*more: str) -> list[str]:
        return [*more] + [
            f"(VllmWorker rank={rank} pid=9) INFO 04-17 " + account(20 + rank // 2, 1, 0, 54.29 - rank // 2)
            for rank in range(4)
        ]

    assigned = [
        f"(VllmWorker rank={rank} pid=9) INFO [parallel_state.py:959] rank {rank} in world size 4 is assigned as "
        f"DP rank 0, PP rank {rank // 2}, TP rank {rank % 2}"
        for rank in range(4)
    ]
    for found in (
        read(lines("config: tensor_parallel_size=2, pipeline_parallel_size=2")),
        read(lines("config: tensor_parallel_size=2")),  # of four ranks
        read(lines(*assigned)),
        read(lines(), tp_size=2),
    ):
        assert layout(found) == (2, 2, 1)
        assert [stage.consumed_gib for stage in found.stages] == [20, 21]
    with pytest.raises(ConfigError, match="--measured-tp-size"):
        read(lines())


def test_sglang_stamps(read: Read) -> None:
    assert layout(read(sglang_log([""], args=""))) == (1, 1, 1)
    assert layout(read(sglang_log([f" TP{i}" for i in range(4)], args=""))) == (4, 1, 1)
    tags = [f" PP{p} TP{t}" for p in range(2) for t in range(4)]
    assert layout(read(sglang_log(tags, args=""))) == (4, 2, 1)
    # Data parallel attention: eight ranks in all, each with requests of its own.
    tags = [f" DP{i} TP{i} EP{i}" for i in range(8)]
    found = read(sglang_log(tags, args="tp_size=8, dp_size=8, enable_dp_attention=True, mem_fraction_static=0.83"))
    assert layout(found) == layout(read(sglang_log(tags, args=""))) == (1, 1, 8)
    assert found.expert_parallel
    # Replicas are launched apart.
    args = "tp_size=4, dp_size=2, enable_dp_attention=False, mem_fraction_static=0.83"
    assert layout(read(sglang_log([f" DP{d} TP{t}" for d in range(2) for t in range(4)], args=args))) == (4, 1, 1)


def test_options_omit_what_is_left_at_its_default(read: Read) -> None:
    lines = [
        "non-default args: {'tensor_parallel_size': 2}",
        *("INFO " + account(5 + i, 1, 0, 69.29 - i) for i in (0, 1)),
    ]
    found = read(lines)
    assert layout(found) == (2, 1, 1)
    assert found.stages[0].consumed_gib == 6  # of two ranks that nobody signed, the one with least room


def test_what_the_user_says_counts_where_the_log_is_silent(read: Read) -> None:
    lines = ["INFO " + account(5, 1, 0, 69.29)]
    assert layout(read(lines, tp_size=4)) == (4, 1, 1)
    assert read(glm_log(), pp_layer_partition=(41, 37)).pp_layer_partition == (41, 37)
    with pytest.raises(ConfigError, match="the log says tp_size 4, --measured-tp-size 8"):
        read(glm_log(), tp_size=8)
    with pytest.raises(ConfigError, match="the log says pp_size 2"):
        read(glm_log(), pp_layer_partition=(20, 20, 38))


@pytest.mark.parametrize(
    ("lines", "messages"),
    [
        (["INFO " + account(5, 1, 0, 69.29)], ["1 account(s) of memory carry no name", "--measured-tp-size"]),
        (glm_log(config=False, names=False), ["2 account(s) of memory carry no name", "--measured-pp-layer-partition"]),
        # The first rank of an axis is named because there are more.
        ([line for line in glm_log(config=False) if "_TP" not in line or "_TP0" in line], ["--measured-tp-size"]),
        ([worker("_DP0_TP0") + account(5, 1, 0, 69.29)], ["--measured-dp-size", "--measured-tp-size"]),
        (glm_log(names=False), ["2 pipeline stages", "no name of a rank", "(Worker_PP0_TP0 pid=1)"]),
        (["config: tensor_parallel_size=2", *QWEN_LOG], ["tp_size 2, yet lines of TP rank 3"]),
        (
            ["config: tensor_parallel_size=1", *("INFO " + account(5 + i, 1, 0, 69.29 - i) for i in range(2))],
            ["2 different accounts of memory that no rank signed, of a run with 1 rank(s)"],
        ),
    ],
)
def test_layouts_that_cannot_be_told(read: Read, lines: list[str], messages: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(lines)
    for message in ("start.log: ", *messages):
        assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# -- logs cut short ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([line for line in glm_log() if "PP1" not in line], r"stage 1 of the measured run \(TP4 PP2\) is missing"),
        ([line for line in glm_log() if "PP0" not in line], r"stage 0 of the measured run \(TP4 PP2\) is missing"),
        (glm_log()[:9], r"stage 1 of the measured run says too little: found kv 15\.56 GiB"),
        (LLAMA_LOG[:1], r"log: the measured run says too little: found weights 15\.00 GiB"),
        (
            [
                LLAMA_LOG[0],
                (
                    "(EngineCore pid=326) INFO [gpu_worker.py:1] Initial free memory 78.84 GiB, reserved 50.00 GiB for "
                    "KV Cache as specified by kv_cache_memory_bytes, skipping memory profiling."
                ),
            ],
            "was given its KV memory",
        ),
    ],
)
def test_what_is_missing_is_named(read: Read, lines: Sequence[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(lines)


# -- several starts ----------------------------------------------------------------------------------------------------


def test_the_last_complete_start_counts(read: Read) -> None:
    found = read(glm_log(EARLIER, tokens="578,432") + glm_log())
    assert [stage.consumed_gib for stage in found.stages] == [50.98, 56.53]
    assert found.kv_tokens == 597_760
    assert found.notes == (f"2 starts in the log: read is the one from line {len(glm_log()) + 1} on",)


def test_a_start_that_was_cut_off_is_left_out(read: Read) -> None:
    found = read(glm_log() + glm_log(EARLIER)[:9])
    assert [stage.consumed_gib for stage in found.stages] == [50.98, 56.53]
    assert "the one from line 1 on" in found.notes[0]
    assert "a later start is left out: stage 1" in found.notes[1]
    with pytest.raises(ConfigError, match="stage 1 of the measured run says too little"):
        read(glm_log()[:9] + glm_log(EARLIER)[:9])


def test_ranks_that_give_account_again_were_started_again(read: Read) -> None:
    found = read(glm_log(EARLIER, config=False) + glm_log(config=False))
    assert [stage.kv_gib for stage in found.stages] == [21.95, 15.56]
    assert len(found.notes) == 1
    assert read([*glm_log(config=False), *glm_log(config=False)]).notes == ()  # every line twice: one start


def test_an_attempt_that_came_to_nothing_says_nothing(read: Read) -> None:
    attempt = GLM_CONFIG.replace("tensor_parallel_size=4", "tensor_parallel_size=2").replace("=524288", "=1048576")
    found = read([attempt, *glm_log()])
    assert (layout(found), found.max_model_len, found.notes) == ((4, 2, 1), 524_288, ())


def test_a_start_of_another_layout_does_not_mix_with_the_one_before(read: Read) -> None:
    # The first start lost its configuration line, and its ranks have other names.
    config = GLM_CONFIG.replace("tensor_parallel_size=4", "tensor_parallel_size=8").replace(
        "pipeline_parallel_size=2", ""
    )
    eight = [config, *(worker(f"_TP{rank}") + account(54.5, 3.5, 1.0, 17.29) for rank in range(8))]
    found = read(glm_log(config=False) + eight)
    assert layout(found) == (8, 1, 1)
    assert [stage.consumed_gib for stage in found.stages] == [54.5]


def test_server_lines_do_not_make_a_start_of_their_own(read: Read) -> None:
    server = ["(APIServer pid=1) INFO [api_server.py:1] vLLM API server version 0.30.0"]
    assert read(server + glm_log()).notes == ()
    assert "2 starts" in read(server + glm_log(EARLIER) + server + glm_log()).notes[0]


def test_engines_of_a_data_parallel_run_are_one_start(read: Read) -> None:
    config = GLM_CONFIG.replace("data_parallel_size=1", "data_parallel_size=2").replace("pipeline_parallel_size=2", "")
    lines = [config.replace("EngineCore", f"EngineCore_DP{i}") for i in range(2)]
    for dp in range(2):
        lines += [worker(f"_DP{dp}_TP{tp}") + account(50 + dp, 2, 1, 23.29 - dp) for tp in range(4)]
        lines.append(f"(EngineCore_DP{dp} pid=1) INFO GPU KV cache size: {900_000 - dp} tokens")
    found = read(lines)
    assert layout(found) == (4, 1, 2)
    assert found.notes == ()
    # Each has a cache of its own; the smaller one is shown, with the memory that it came from.
    assert (found.kv_tokens, found.stages[0].consumed_gib) == (899_999, 51)


def test_two_starts_of_sglang_do_not_add_up(read: Read) -> None:
    tags = [" TP0", " TP1"]
    found = read(sglang_log(tags) + sglang_log(tags))
    assert found.stages[0].weights_gib == 14.43
    assert "2 starts" in found.notes[0]


def test_a_rank_adds_up_by_itself(read: Read) -> None:
    # Ranks differ: least room counts, and with it the same rank's other numbers.
    ranks = {0: (50.98, 2.36, 0.76, 21.95), 1: (51.00, 2.20, 0.76, 22.09), 2: (51.20, 2.20, 0.76, 21.89)}
    lines = [worker(f"_TP{rank}") + account(*numbers) for rank, numbers in ranks.items()]
    (stage,) = read(lines).stages
    assert (stage.consumed_gib, stage.activation_gib, stage.kv_gib) == (51.20, 2.20, 21.89)
    assert GLM_STAGES[0][0] + GLM_STAGES[0][1] + GLM_STAGES[0][3] == pytest.approx(0.95 * 79.25, abs=0.01)
