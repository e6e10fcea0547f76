"""Traces of the embedded models, made once per session and shared between xdist workers through a directory."""

from __future__ import annotations

import os

import pytest
from embedded import Traces


@pytest.fixture(scope="session")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Traces:
    root = tmp_path_factory.getbasetemp()
    shared = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    return Traces(shared / "property-traces")
