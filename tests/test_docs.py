"""What README and docs show is what the commands print, and every path they name exists."""

import re

import pytest

from benchmarks.docs import FILES, ROOT, blocks

BLOCKS = [block for file in FILES for block in blocks(file)]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: f"{b.file.name}: {b.command[:60]}")
def test_console_block(block):
    assert block.run() == block.output


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_links_lead_somewhere(file):
    for target in re.findall(r"\]\(([^)#]+)", file.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (file.parent / target).exists(), target


def test_there_are_console_blocks():
    assert len(BLOCKS) >= 5


def test_the_version_is_stated_once_in_the_changelog():
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
