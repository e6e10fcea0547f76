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
from tensor_cast.performance_model.pipeline import StageTimes, play, steady_flow

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
    slots = play(times, times, 0.0, 3, 4)
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
        ends = [s.end for s in play(times, times, 0.0, batches, 40) if s.stage == 2 and s.batch == 0]
        assert ends[-1] - ends[-2] == pytest.approx(float(steady_flow(times, batches).cycle))


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
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
