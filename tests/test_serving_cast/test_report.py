"""The report: bars as long as what they stand for, blocks that never overlap, a file that needs nothing else."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cli.inference import throughput_optimizer
from tensor_cast.core.html_report import Bar, Block, Section, memory_svg, render_page, timeline_svg, write_report
from tensor_cast.errors import ConfigError
from tensor_cast.performance_model.pipeline import StageTimes, busy_steps, mixed_flow, play, steady_flow

SVG = "{http://www.w3.org/2000/svg}"


def rects(svg: str) -> list[tuple[float, float, float, str]]:
    """(x, y, width, title) of every rectangle that has a title."""
    root = ElementTree.fromstring(svg)
    return [
        (float(r.get("x", 0)), float(r.get("y", 0)), float(r.get("width", 0)), title.text or "")
        for r in root.iter(f"{SVG}rect")
        if (title := r.find(f"{SVG}title")) is not None
    ]


def test_bars_are_to_scale() -> None:
    bars = [
        Bar("stage 0", (("weights", 30.0), ("KV", 20.0)), 75.0),
        Bar("stage 1", (("weights", 40.0), ("KV", 25.0)), 75.0),
    ]
    svg = memory_svg(bars)
    found = rects(svg)
    scale = found[0][2] / 30.0
    assert [width / scale for _, _, width, _ in found] == pytest.approx([30, 20, 40, 25], rel=1e-3)
    assert found[1][0] == pytest.approx(found[0][0] + found[0][2], abs=0.02)  # stacked, no gap
    lines = [float(x) for x in re.findall(r'<line x1="([\d.]+)"', svg)]
    assert [(x - found[0][0]) / scale for x in lines] == pytest.approx([75, 75], rel=1e-3)
    assert "50.00 of 75.00 GiB" in svg


def test_blocks_are_to_scale_and_apart() -> None:
    times = StageTimes((1e-3, 2e-3, 1.5e-3), (0.0, 2e-4, 2e-4), 1e-4)
    slots = play(times, times, [False] * 12, 3)
    blocks = [Block(s.stage, s.begin, s.end, s.batch, f"{s.batch}", f"{s.end - s.begin}") for s in slots]
    found = rects(timeline_svg(["a", "b", "c"], blocks))
    assert len(found) == len(slots) == 3 * 3 * 4
    scale = found[0][2] / 1e-3
    for _, _, width, title in found:
        assert width == pytest.approx(float(title) * scale, abs=0.02)
    for stage in {y for _, y, _, _ in found}:
        row = sorted((x, x + width) for x, y, width, _ in found if y == stage)
        assert all(end <= begin + 0.03 for (_, end), (begin, _) in pairwise(row))


def test_played_batches_keep_the_pace_of_the_flow() -> None:
    times = StageTimes((1e-3, 2e-3, 1.5e-3), (0.0, 2e-4, 2e-4), 1e-4)
    for batches in (1, 3, 4):
        ends = [s.end for s in play(times, times, [False] * 40 * batches, batches) if s.stage == 2 and s.batch == 0]
        assert ends[-1] - ends[-2] == pytest.approx(float(steady_flow(times, batches).cycle))


@pytest.mark.parametrize(("share", "at"), [(0.0625, 12), (0.3, 7), (0.64, 3), (1.0, 0)])
def test_busy_steps_are_as_many_as_their_share(share: float, at: int) -> None:
    kinds = busy_steps(share, 10_000, at)
    assert kinds[at]
    assert sum(kinds) == pytest.approx(10_000 * share, abs=1)
    gaps = {after - before for before, after in pairwise([k for k, busy in enumerate(kinds) if busy])}
    assert max(gaps) - min(gaps) <= 1
    assert not any(busy_steps(0.0, 100, at))


def test_played_long_steps_hold_up_the_batch_behind() -> None:
    """One step in 16 takes 10 ms instead of 1: on either stage the other batch waits, 2 of 16 slots are long."""
    calm, busy = (StageTimes((t, t), (0.0, 0.0), 0.0) for t in (1e-3, 1e-2))
    slots = play(calm, busy, busy_steps(1 / 16, 16 * 400, 5), 2)
    seconds = (slots[-1].end - slots[0].begin) / (16 * 400)
    assert seconds == pytest.approx((14 * 1e-3 + 2 * 1e-2) / 16, rel=1e-2)
    # The closed form takes long steps to fall at random, so that a few meet: 1 - (15/16)^2 of the slots are long.
    assert float(mixed_flow(calm, busy, 1 / 16, 2).slot) == pytest.approx(1e-3 + 9e-3 * (1 - (15 / 16) ** 2))


def test_timeline_shows_a_step_with_a_chunk(tmp_path: Path) -> None:
    """32 requests of 4,096 + 512 tokens: one step in 16 carries a prompt. It is drawn to scale, and waited for."""
    file = tmp_path / "report.html"
    options = "--device H100_SXM --num-devices 16 --input-length 4096 --output-length 512 --tp-sizes 8 --pp-sizes 2"
    only = "--dp-sizes 1 --dcp-sizes 1 --batch-range 32 32"
    argv = ["meta-llama/Meta-Llama-3.1-70B", *options.split(), *only.split(), "--report", str(file)]
    assert throughput_optimizer.main(argv) == 0
    text = file.read_text(encoding="utf-8")
    assert "6.25 % of all steps, one in 16," in text
    picture = re.findall(r"<svg.*?</svg>", text, re.DOTALL)[2]
    found = [r for r in rects(picture) if "transfer" not in r[3]]
    framed = [r for r in found if "with a chunk" in r[3]]
    assert len({y for _, y, _, _ in framed}) == len(framed) == 2, "the same step on both stages"
    assert len({title[:2] for *_, title in framed}) == 1

    def scale(rect: tuple[float, float, float, str]) -> float:
        return rect[2] / float(rect[3].rsplit(": ", 1)[1].removesuffix(" ms"))

    whole = [r for r in found if r[0] > 151 and r[0] + r[2] < 939]
    assert [scale(r) for r in whole] == pytest.approx([scale(framed[0])] * len(whole), rel=0.01)
    # Stage 1 waits while the chunk is on stage 0: nothing is drawn there for most of that time.
    (first, last) = sorted(framed, key=lambda r: r[1])
    ends = [x + width for x, y, width, _ in found if y == last[1] and x < last[0]]
    assert last[0] - max(ends) > 0.8 * first[2]


def test_a_part_of_memory_has_one_colour_in_every_report() -> None:
    serving = memory_svg([Bar("s", (("weights", 9.0), ("KV cache", 9.0), ("activation", 9.0), ("x", 9.0)), 50.0)])
    capacity = memory_svg([Bar("s", (("weights", 9.0), ("non-torch", 9.0), ("KV cache", 9.0), ("KV idle", 9.0)), 50.0)])

    def colours(svg: str) -> dict[str, str]:
        return {name: colour for colour, name in re.findall(r'fill="(#\w+)"[^>]*><title>([^:]*): 9.00', svg)}

    ours, theirs = colours(serving), colours(capacity)
    assert len(ours) == len(theirs) == 4
    assert {name: ours[name] for name in ("weights", "KV cache")} == {n: theirs[n] for n in ("weights", "KV cache")}
    assert len(set(ours.values()) | set(theirs.values())) == 6, "no two parts share one"


def test_page_is_whole_and_escaped(tmp_path: Path) -> None:
    text = render_page("a <b>", "c & d", [Section("e", "f", (memory_svg([]),), (("g", "h"), ("i", "<j>")), ("k",))])
    assert "a &lt;b&gt;" in text
    assert "&lt;j&gt;" in text
    assert not re.search(r"(src|href)=|@import|https?://(?!www\.w3\.org/2000/svg)", text)
    with pytest.raises(ConfigError, match="folder that exists"):
        write_report(tmp_path / "no" / "r.html", "t", "s", [])


def test_layers_that_lack_indices_are_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.html"
    options = "--device H200_SXM --num-devices 16 --input-length 4096 --output-length 512 --tp-sizes 8 --pp-sizes 2"
    only = "--dp-sizes 1 --ep-sizes 1 --dcp-sizes 1 --pp-layer-partition 39,39 --batch-range 1 4"
    for how, words in (("unsafe", "UNSAFE: layers 39, 40, 41"), ("self-compute", "layers 39, 40, 41 get an indexer")):
        argv = ["zai-org/GLM-5.3", *options.split(), *only.split(), "--dsa-split", how, "--report", str(file)]
        assert throughput_optimizer.main([*argv, "--quantize-linear-action", "FP8"]) == 0
        assert words in file.read_text(encoding="utf-8")
        assert ("UNSAFE" in capsys.readouterr().out) == (how == "unsafe")


def test_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.html"
    options = "--device H100_SXM --num-devices 8 --input-length 4096 --output-length 512 --tp-sizes 4 --pp-sizes 2"
    argv = ["meta-llama/Meta-Llama-3.1-70B", *options.split(), "--dp-sizes", "1", "--dcp-sizes", "1"]
    assert throughput_optimizer.main([*argv, "--format", "json", "--report", str(file)]) == 0
    text = file.read_text(encoding="utf-8")
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(pictures) == 3
    weights = [title for *_, title in rects(pictures[0]) if title.startswith("weights")]
    assert weights == ["weights: 16.43 GiB", "weights: 16.43 GiB"]
    assert "stage 1: layers 40-79" in text
    out = json.loads(capsys.readouterr().out)
    head, first, last, *idle = re.findall(r"<tr>(.*?)</tr>", text.split("Batches over stages")[1], re.DOTALL)
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in (head, first, last)]
    assert [c[:3] for c in cells] == [
        ["", "layers", "layer equivalents"],
        ["stage 0", "40", "40"],
        ["stage 1", "40", "40"],
    ]
    assert [c[5] for c in cells[1:]] == [f"{stage['slot_ms']:.2f}" for stage in out["best"]["stages"]]
    assert len(idle) == 5
    assert {title[:2] for *_, title in rects(pictures[1])} >= {"A1", "A2"}
    assert {title[:1] for *_, title in rects(pictures[2])} == {"A", "B"}
    idle_by_cause = [f"{100 * share:.1f} %" for share in out["best"]["pp_idle"].values()]
    assert [re.findall(r"<td>(.*?)</td>", row)[-1] for row in idle] == idle_by_cause
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
