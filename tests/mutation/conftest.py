"""The tiny models are those of the equivalence matrix."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "equivalence"))
