"""Start-up logs of serving engines: one module for each engine's lines, and a registry of them.

A log is cut into starts, a start into ranks, and the ranks are brought together by pipeline stage. ``format`` says
what an engine's lines look like; ``starts`` cuts; ``layout`` tells the parallel sizes of the run; ``stages`` brings the
ranks together.
"""

from tensor_cast.core.engine_logs.format import LogFormat
from tensor_cast.core.engine_logs.layout import GivenLayout
from tensor_cast.core.engine_logs.sglang import SGLANG
from tensor_cast.core.engine_logs.stages import start_values
from tensor_cast.core.engine_logs.starts import split_starts
from tensor_cast.core.engine_logs.vllm import VLLM
from tensor_cast.core.engine_logs.vllm_ascend import VLLM_ASCEND

__all__ = ["LOG_FORMATS", "GivenLayout", "detect_format", "split_starts", "start_values"]

#: Engines whose logs are understood. The last one has no words of its own: it gets the logs that nobody else claims.
LOG_FORMATS: tuple[LogFormat, ...] = (SGLANG, VLLM_ASCEND, VLLM)


def detect_format(text: str) -> LogFormat:
    """The format of the engine that printed ``text``."""
    return next((form for form in LOG_FORMATS if form.printed(text)), LOG_FORMATS[-1])
