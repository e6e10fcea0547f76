"""The console blocks of README and docs: run each command and compare, or write what it prints now.

    python -m benchmarks.docs                       # list what differs, exit code 1 if anything does
    python -m benchmarks.docs --write [FILE ...]    # bring the files up to date

A block is fenced as ``console``; its first line is ``$ command`` (continued with a backslash), the rest is what the
command prints. Only ``msmodeling`` and ``throughput_optimizer`` are run, in a process of their own.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_BLOCK = re.compile(r"^```console\n\$ (?P<command>(?:[^\n]*\\\n)*[^\n]*)\n(?P<output>.*?)^```$", re.M | re.S)
_MODULES = {"msmodeling": "cli.main", "throughput_optimizer": "cli.inference.throughput_optimizer"}


@dataclass(frozen=True)
class Block:
    """One command with the output that the document shows."""

    file: Path
    command: str
    output: str

    @property
    def arguments(self) -> list[str]:
        """The command as words."""
        return shlex.split(self.command.replace("\\\n", " "))

    def run(self) -> str:
        """What the command prints now; trailing blanks removed, as editors do."""
        program, *rest = self.arguments
        done = subprocess.run(
            [sys.executable, "-m", _MODULES[program], *rest],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "COLUMNS": "200", "PYTHONPATH": str(ROOT)},
        )
        lines = [line.rstrip() for line in (done.stdout + done.stderr).splitlines()]
        return "\n".join(lines).strip("\n") + "\n"


def blocks(file: Path) -> Iterator[Block]:
    """The console blocks of ``file`` whose command is ours."""
    for match in _BLOCK.finditer(file.read_text(encoding="utf-8")):
        if match["command"].split()[0] in _MODULES:
            yield Block(file, match["command"], match["output"])


def refresh(file: Path) -> bool:
    """Rewrite the outputs in ``file``; whether anything changed."""
    before = file.read_text(encoding="utf-8")

    def again(match: re.Match[str]) -> str:
        if match["command"].split()[0] not in _MODULES:
            return match[0]
        return f"```console\n$ {match['command']}\n{Block(file, match['command'], '').run()}```"

    after = _BLOCK.sub(again, before)
    if after != before:
        file.write_text(after, encoding="utf-8")
    return after != before


def main() -> int:
    """Compare or write; exit code 1 when a document differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="bring the files up to date")
    parser.add_argument("files", nargs="*", type=Path, help="README and all of docs by default")
    args = parser.parse_args()
    files = [file.resolve() for file in args.files] or FILES
    if args.write:
        for file in files:
            print(f"{'changed' if refresh(file) else 'same':>8}  {file.relative_to(ROOT)}")
        return 0
    differs = 0
    for file in files:
        for block in blocks(file):
            now = block.run()
            if now != block.output:
                differs += 1
                shown = difflib.unified_diff(
                    block.output.splitlines(), now.splitlines(), "document", "now", lineterm=""
                )
                print(f"{file.name}: $ {block.command}", *shown, sep="\n")
    return int(differs > 0)


if __name__ == "__main__":
    sys.exit(main())
