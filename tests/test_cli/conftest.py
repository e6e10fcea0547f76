"""Running the command line in process: fast, and with what it prints and its exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from cli.main import main


@dataclass(frozen=True)
class Result:
    """What a command did."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """``run("trace", "Qwen/Qwen3-8B", "--tp-size", 2)`` -> :class:`Result`."""

    def run_command(*arguments: object) -> Result:
        try:
            code = main([str(a) for a in arguments])
        except SystemExit as stop:  # argparse's own errors
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run_command
