"""The data files are found in a checkout and in an installed wheel; loading them is cheap."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tensor_cast
from tensor_cast.config_files import config_root

PACKAGE = Path(tensor_cast.__file__).parent
LOAD = """
from tensor_cast.config_files import config_root
from tensor_cast.device.catalog import device_names, load_device
from tensor_cast.engine.catalog import load_engine
from tensor_cast.model_catalog import load_model_config
print(config_root())
model = load_model_config("DeepSeek-R1")
print(len(device_names()), load_device("H200_SXM").name, load_engine("vllm").name, model.model_id)
"""


def _run(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", LOAD], cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The package laid out as in a wheel: no configs/ beside it, unless a test puts the files inside."""
    shutil.copytree(PACKAGE, tmp_path / "tensor_cast", ignore=shutil.ignore_patterns("__pycache__", "_configs"))
    return tmp_path


def test_a_checkout() -> None:
    run = _run(PACKAGE.parent)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [str(config_root()), "34", "H200_SXM", "vllm", "deepseek-ai/DeepSeek-R1"]


def test_a_wheel(installed: Path) -> None:
    shutil.copytree(config_root(), installed / "tensor_cast" / "_configs")
    run = _run(installed)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split()[0] == str(installed / "tensor_cast" / "_configs")


def test_an_installation_without_the_files_says_so(installed: Path) -> None:
    run = _run(installed)
    assert "ConfigError: the configuration files are missing" in run.stderr
    assert "reinstall the package" in run.stderr
