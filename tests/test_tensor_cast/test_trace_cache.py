"""The trace cache: what comes out is what went in, damage and races are harmless, a warm run needs no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tracer_models import TINY, tiny

import tensor_cast.ir.cache as cache_module
from tensor_cast.core.trace_library import TraceLibrary
from tensor_cast.ir.cache import (
    TraceCache,
    default_cache_dir,
    part_from_json,
    part_to_json,
    skeleton_from_json,
    skeleton_to_json,
)
from tensor_cast.ir.program import PartRequest
from tensor_cast.ir.record import Phase, Trace
from tensor_cast.model_config import ParallelConfig

DCP = ParallelConfig(4, decode_context_parallel_size=2)


def traced(library: TraceLibrary, parallel: ParallelConfig = DCP, mtp: int = 1) -> Trace:
    return library.trace(parallel, Phase.DECODE, dcp_semantics="rfc", block_size=4, num_mtp_tokens=mtp)


@pytest.mark.parametrize("name", sorted(TINY))
def test_round_trip(name: str) -> None:
    library = TraceLibrary(tiny(name), use_cache=False)
    trace = traced(library, ParallelConfig(2, 1, 2, 4 if "moe" in name else 1), 0)
    for segment in trace.segments:
        assert part_from_json(json.loads(json.dumps(part_to_json(segment.part)))) == segment.part
    skeleton = library.skeleton
    assert skeleton_from_json(json.loads(json.dumps(skeleton_to_json(skeleton)))) == skeleton


def test_second_library_reads_what_the_first_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = traced(TraceLibrary(tiny("deepseek_v3"), cache_dir=tmp_path))
    second = TraceLibrary(tiny("deepseek_v3"), cache_dir=tmp_path)
    monkeypatch.setattr(second, "_tracer", lambda: pytest.fail("traced again"))
    assert traced(second) == first


def test_damaged_files_are_traced_again(tmp_path: Path) -> None:
    expected = traced(TraceLibrary(tiny("deepseek_v3"), cache_dir=tmp_path))
    files = sorted(tmp_path.rglob("*.json"))
    assert len(files) > 5
    contents = {file: file.read_bytes() for file in files}
    for number, file in enumerate(files):
        raw = contents[file]
        damaged = [b"", raw[: len(raw) // 2], raw[:-1] + b" ", b"\x00" * len(raw), raw.replace(b"aten", b"atem", 1)]
        file.write_bytes(damaged[number % len(damaged)])
    assert traced(TraceLibrary(tiny("deepseek_v3"), cache_dir=tmp_path)) == expected
    assert {file: file.read_bytes() for file in files} == contents  # and written anew
    assert not list(tmp_path.rglob("*.tmp"))


def test_valid_file_of_another_key_is_not_believed(tmp_path: Path) -> None:
    cache = TraceCache(tmp_path, "digest")
    library = TraceLibrary(tiny("llama"), use_cache=False)
    part = traced(library, ParallelConfig(2), 0).segments[0].part
    cache.store_part(part)
    assert cache.load_part(part.key) == part
    other = cache.path("other/key")
    other.parent.mkdir(parents=True, exist_ok=True)
    other.write_bytes(cache.path(part.key).read_bytes())
    assert cache.load_part("other/key") is None


def test_keys_follow_model_and_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = TraceCache(tmp_path, "a").path("k"), TraceCache(tmp_path, "b").path("k")
    assert one != two
    assert TraceCache(tmp_path, "a").path("k2") != one
    monkeypatch.setattr(cache_module, "code_digest", lambda: "another version")
    assert TraceCache(tmp_path, "a").path("k") != one


def test_part_keys_hold_what_a_part_depends_on() -> None:
    base = {"tp": 8, "block_size": 128, "dcp": 2, "dcp_semantics": "vllm", "interleave": 1}
    key = PartRequest("attention", "0.self_attn", "decode", **base).key
    for name, value in {"tp": 16, "block_size": 64, "dcp": 4, "dcp_semantics": "rfc", "interleave": 2}.items():
        assert PartRequest("attention", "0.self_attn", "decode", **{**base, name: value}).key != key
    moe = PartRequest("moe", "3.mlp", tp=8, dp=2, ep=16).key
    for name in ("tp", "dp", "ep", "moe_dp"):
        assert PartRequest("moe", "3.mlp", **{"tp": 8, "dp": 2, "ep": 16, name: 4}).key != moe


def test_writers_at_the_same_time(tmp_path: Path) -> None:
    part = traced(TraceLibrary(tiny("llama"), use_cache=False), ParallelConfig(2), 0).segments[0].part
    cache = TraceCache(tmp_path, "digest")
    seen: list[bool] = []

    def work() -> None:
        for _ in range(30):
            cache.store_part(part)
            seen.append(cache.load_part(part.key) == part)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(seen)
    assert [p.suffix for p in tmp_path.rglob("*.*")] == [".json"]


def test_directory_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    assert traced(TraceLibrary(tiny("llama"), cache_dir=blocked / "below"), ParallelConfig(2), 0).segments


def test_default_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MSMODELING_CACHE_DIR", str(tmp_path))
    assert default_cache_dir() == tmp_path
    monkeypatch.delenv("MSMODELING_CACHE_DIR")
    assert default_cache_dir().parts[-2:] == ("msmodeling", "traces")


def test_warm_run_imports_no_torch(tmp_path: Path) -> None:
    traced(TraceLibrary(tiny("deepseek_v3"), cache_dir=tmp_path))
    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\n"
        "from test_trace_cache import traced, TraceLibrary, tiny\n"
        "assert traced(TraceLibrary(tiny('deepseek_v3'), cache_dir=Path(sys.argv[1]))).ops\n"
        "loaded = {'torch', 'transformers', 'sympy'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": str(here.parents[1])}
    subprocess.run([sys.executable, "-c", code, str(tmp_path), str(here)], check=True, env=environment, timeout=60)
