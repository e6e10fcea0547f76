"""Options that go by other names elsewhere: in another command of ours, in vLLM or in SGLang."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["suggestion"]

#: Names for one thing; which of them an option is called differs between commands.
_GROUPS: tuple[tuple[str, ...], ...] = (
    ("--tp-size", "--tp-sizes", "--tensor-parallel-size"),
    ("--pp-size", "--pp-sizes", "--pipeline-parallel-size"),
    ("--dp-size", "--dp-sizes", "--data-parallel-size"),
    ("--ep-size", "--ep-sizes", "--enable-expert-parallel"),
    ("--moe-dp-size", "--moe-dp-sizes"),
    ("--dcp-size", "--dcp-sizes", "--decode-context-parallel-size"),
    ("--num-queries", "--batch-size", "--batch-range", "--concurrency"),
    ("--query-length", "--query-len", "--input-length"),
    ("--context-length", "--context-len", "--max-model-len"),
    ("--max-num-batched-tokens", "--max-batched-tokens", "--chunked-prefill-size"),
    ("--gpu-memory-utilization", "--mem-fraction-static"),
    ("--kv-cache-dtype", "--quantize-attention-action"),
    ("--quantization", "--quantize-linear-action"),
    ("--num-mtp-tokens", "--num-speculative-tokens"),
    ("--kv-memory-gib", "--kv-cache-memory", "--kv-cache-memory-bytes"),
    ("--decode", "--phase"),
)


def suggestion(unknown: Iterable[str], known: Iterable[str]) -> str:
    """What to use instead of options that a command does not have; empty if nothing comes near.

    Args:
        unknown: arguments that were not recognised, values among them.
        known: options of the command.
    """
    options = sorted(known)
    found: list[str] = []
    for argument in unknown:
        name = argument.partition("=")[0]
        if not name.startswith("--"):
            continue
        same = [other for group in _GROUPS if name in group for other in group if other in options]
        near = same or difflib.get_close_matches(name, options, n=1, cutoff=0.75)
        if near:
            found.append(f"{' or '.join(dict.fromkeys(near))} for {name}")
    return f"; did you mean {', '.join(found)}?" if found else ""
