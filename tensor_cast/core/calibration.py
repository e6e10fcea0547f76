"""What an engine measured at start-up: read from its log, or from numbers in a YAML or JSON file.

Understood are the lines that vLLM (0.6 to 0.33), vllm-ascend and SGLang print about memory. "GB" in them means GiB. A
log with several workers gives one entry for each pipeline stage: the worst of its ranks.

A file of numbers looks like this; everything but ``stages`` may be left out::

    pp_layer_partition: [39, 39]
    tp_size: 4
    num_mtp_tokens: 3
    max_model_len: 524288
    gpu_memory_utilization: 0.95
    total_gib: 79.25
    kv_tokens: 597760
    stages:
      - {consumed_gib: 50.98, activation_gib: 2.36, graph_gib: 0.76, kv_gib: 21.95}
      - {consumed_gib: 56.53, activation_gib: 3.20, graph_gib: 1.49, kv_gib: 15.564}
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from tensor_cast.config_files import explain
from tensor_cast.errors import ConfigError

__all__ = ["Calibration", "MeasuredStage", "read_calibration"]

Gib = Annotated[float, Field(ge=0)]


class MeasuredStage(BaseModel):
    """Memory of one pipeline stage in GiB, None where nothing was printed.

    Args:
        consumed_gib: weights, workspaces and what is outside the allocator, in one number.
        weights_gib: weights alone.
        non_torch_gib: outside the allocator.
        activation_gib: peak of the profile run.
        graph_gib: captured graphs.
        graph_in_activation: ``activation_gib`` holds an estimate of the graphs already (vLLM since 0.21).
        kv_gib: available for the KV cache.
        free_gib: free before the weights were loaded (SGLang).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    consumed_gib: Gib | None = None
    weights_gib: Gib | None = None
    non_torch_gib: float | None = None
    activation_gib: Gib | None = None
    graph_gib: Gib | None = None
    graph_in_activation: bool = True
    kv_gib: Gib | None = None
    free_gib: Gib | None = None

    @model_validator(mode="after")
    def _says_enough(self) -> Self:
        loaded = self.weights_gib is not None and (self.non_torch_gib is not None or self.free_gib is not None)
        if self.consumed_gib is None and not loaded and (self.kv_gib is None or self.activation_gib is None):
            raise ValueError(
                "needs consumed_gib; or weights_gib with non_torch_gib or free_gib; or kv_gib with activation_gib"
            )
        if self.kv_gib is None and self.activation_gib is None:
            raise ValueError("needs kv_gib or activation_gib")
        return self


class Calibration(BaseModel):
    """One start-up: its layout as far as it is known, and what each stage measured.

    Args:
        source: the file.
        engine: ``vllm``, ``vllm-ascend`` or ``sglang`` as the log shows it.
        stages: by pipeline stage.
        kv_tokens: KV cache in tokens that the engine reported.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str = ""
    engine: str | None = None
    tp_size: PositiveInt | None = None
    pp_size: PositiveInt | None = None
    dcp_size: PositiveInt | None = None
    pp_layer_partition: tuple[int, ...] | None = None
    num_mtp_tokens: Annotated[int, Field(ge=0)] | None = None
    max_model_len: PositiveInt | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    total_gib: Annotated[float, Field(gt=0)] | None = None
    kv_tokens: PositiveInt | None = None
    stages: Annotated[tuple[MeasuredStage, ...], Field(min_length=1)]


def read_calibration(path: str | Path) -> Calibration:
    """The start-up in ``path``: a YAML or JSON mapping with ``stages``, else a log.

    Raises:
        ConfigError: the file cannot be read, or holds neither.
    """
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}; give a log or a YAML file") from error
    content = _mapping(file, text)
    if content is None:
        content = parse_log(text)
        if not content["stages"]:
            raise ConfigError(
                f"{file}: no memory lines of vLLM, vllm-ascend or SGLang found (such as 'Available KV cache memory: "
                "15.56 GiB' or 'Actual usage is ...'); or give a YAML file with stages"
            )
    try:
        return Calibration.model_validate({"source": file.name, **content})
    except ValidationError as error:
        raise explain(file, error) from error


def _mapping(file: Path, text: str) -> dict[str, Any] | None:
    """The content of a file of numbers; None for a log."""
    if file.suffix not in (".yaml", ".yml", ".json"):
        return None
    try:
        content = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} cannot be parsed: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold a mapping with stages; it holds {type(content).__name__}")
    return content


# -- logs --------------------------------------------------------------------------------------------------------------

_NUMBER = r"(-?[\d.,]+)"
_GRAPH = r"(?:CUDA|NPU|ACL) ?[Gg]raph"

#: Lines about one rank: pattern -> names of its groups. Of several lines the worst counts, see _WORST.
_RANK_LINES: tuple[tuple[str, tuple[str, ...]], ...] = (
    # vLLM 0.28 on: the activation peak holds an estimate of the graphs.
    (
        (
            rf"Actual usage is {_NUMBER} GiB for consumed memory.*?{_NUMBER} GiB for peak activation"
            rf"(?:.*?{_NUMBER} GiB for {_GRAPH})?"
        ),
        ("consumed_gib", "activation_gib", "graph_gib"),
    ),
    # vLLM 0.11 to 0.2x, vllm-ascend.
    (
        (
            rf"Actual usage is {_NUMBER} GiB for weights?, {_NUMBER} GiB for peak activation, {_NUMBER} GiB for "
            rf"non-torch memory(?:,? and {_NUMBER} GiB for {_GRAPH})?"
        ),
        ("weights_gib", "activation_gib", "non_torch_gib", "separate_graph_gib"),
    ),
    (
        (
            rf"torch peak memory increase: {_NUMBER} ?GiB; non-torch forward increase memory: {_NUMBER} ?GiB; "
            rf"weights memory: {_NUMBER} ?GiB"
        ),
        ("activation_gib", "non_torch_gib", "weights_gib"),
    ),
    # vLLM 0.6 to 0.8.
    (
        (
            rf"model weights take {_NUMBER} ?GiB; non_torch_memory takes {_NUMBER} ?GiB; PyTorch activation peak "
            rf"memory takes {_NUMBER} ?GiB; the rest of the memory reserved for KV Cache is {_NUMBER} ?GiB"
        ),
        ("weights_gib", "non_torch_gib", "activation_gib", "kv_gib"),
    ),
    (rf"Model loading took {_NUMBER} G", ("weights_gib",)),
    (rf"Loading model weights took {_NUMBER} G", ("weights_gib",)),
    (rf"Available KV cache memory: {_NUMBER} GiB", ("kv_gib",)),
    (rf"Graph capturing finished in .*?took {_NUMBER} GiB", ("graph_gib",)),
    # SGLang.
    (rf"Load weight begin\. avail mem={_NUMBER} GB", ("free_gib",)),
    (rf"Load weight end\..*?mem usage={_NUMBER} GB", ("weights_gib",)),
    (rf"KV Cache is allocated\..*?K size: {_NUMBER} GB, V size: {_NUMBER} GB", ("kv_gib", "kv_gib")),
    (rf"KV Cache is allocated\..*?KV size: {_NUMBER} GB", ("kv_gib",)),
    (rf"Capture cuda graph end\..*?mem usage={_NUMBER} GB", ("separate_graph_gib",)),
)

#: Lines about the whole run.
_RUN_LINES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (rf"Free memory on device(?: \S+)? \({_NUMBER}/{_NUMBER} GiB\)", ("", "total_gib")),
    (rf"Desired GPU memory utilization is \({_NUMBER}, {_NUMBER} GiB\)", ("gpu_memory_utilization", "")),
    (
        rf"total_gpu_memory \({_NUMBER} ?GiB\) x gpu_memory_utilization \({_NUMBER}\)",
        ("total_gib", "gpu_memory_utilization"),
    ),
    (r"gpu_memory_utilization['\"]?[=:] ?([\d.]+)", ("gpu_memory_utilization",)),
    (r"mem_fraction_static=([\d.]+)", ("gpu_memory_utilization",)),
    (r"(?:GPU|NPU) KV cache size: ([\d,]+) tokens", ("kv_tokens",)),
    (r"#tokens: (\d+)", ("kv_tokens",)),
    (r"Maximum concurrency for ([\d,]+) tokens per request", ("max_model_len",)),
    (r"(?:max_seq_len|max_model_len|context_length)=(\d+)", ("max_model_len",)),
    (r"(?:tensor_parallel_size|tp_size)['\"]?[=:] ?(\d+)", ("tp_size",)),
    (r"(?:pipeline_parallel_size|pp_size)['\"]?[=:] ?(\d+)", ("pp_size",)),
    (r"decode_context_parallel_size['\"]?[=:] ?(\d+)", ("dcp_size",)),
    (r"(?:num_spec_tokens|num_speculative_tokens)['\"]?[=:] ?(\d+)", ("num_mtp_tokens",)),
    (r"Hidden layers were unevenly partitioned: \[([\d, ]+)\]", ("pp_layer_partition",)),
    (r"VLLM_PP_LAYER_PARTITION['\"]?[=:] ?['\"]?(\d+(?:, ?\d+)*)", ("pp_layer_partition",)),
)

#: vLLM: (Worker_PP0_TP1 pid=1); SGLang: [.. PP0 TP1].
_STAGE = re.compile(r"(?:Worker|\[)[^)\]]*?PP(\d+)")

#: Of the ranks of a stage: the one with the least room for the KV cache, and the most of everything else.
_WORST: dict[str, Callable[[list[float]], float]] = defaultdict(lambda: max, {"kv_gib": min, "free_gib": min})

_INTEGERS = ("kv_tokens", "max_model_len", "tp_size", "pp_size", "dcp_size", "num_mtp_tokens")


def parse_log(text: str) -> dict[str, Any]:
    """What the lines of a start-up log say, by field of :class:`Calibration`; ``stages`` is empty if nothing does."""
    ranks: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    run: dict[str, Any] = {}
    for line in text.splitlines():
        stage = _STAGE.search(line)
        for name, value in _found(_RANK_LINES, line, add_up=True):
            ranks[int(stage[1]) if stage else 0][name].append(float(value))
        for name, value in _found(_RUN_LINES, line):
            run.setdefault(name, value)
    stages = [_stage_values(ranks[i]) for i in sorted(ranks)]
    for name, value in run.items():
        if name == "pp_layer_partition":
            run[name] = tuple(int(field) for field in value.split(","))
        else:
            run[name] = int(value) if name in _INTEGERS else float(value)
    if "sglang" in text.casefold() or "KV Cache is allocated" in text:
        run["engine"] = "sglang"
    elif "vllm_ascend" in text or "NPUGraph" in text or "NPU KV cache" in text:
        run["engine"] = "vllm-ascend"
    else:
        run["engine"] = "vllm"
    return {**run, "stages": [stage for stage in stages if stage]}


def _found(
    lines: tuple[tuple[str, tuple[str, ...]], ...], line: str, *, add_up: bool = False
) -> Iterator[tuple[str, str]]:
    """(name, number) of every pattern that ``line`` matches; groups of one name are added."""
    for pattern, names in lines:
        match = re.search(pattern, line)
        if match is None:
            continue
        values: dict[str, str] = {}
        for name, value in zip(names, match.groups(), strict=True):
            if name and value is not None:
                plain = value if name == "pp_layer_partition" else value.replace(",", "").rstrip(".")
                values[name] = str(float(values[name]) + float(plain)) if add_up and name in values else plain
        yield from values.items()


def _stage_values(values: dict[str, list[float]]) -> dict[str, Any]:
    out: dict[str, Any] = {name: _WORST[name](found) for name, found in values.items()}
    separate = out.pop("separate_graph_gib", None)
    out["graph_in_activation"] = "consumed_gib" in out
    if separate is not None:
        out["graph_gib"] = separate
    if "consumed_gib" in out:
        out.pop("weights_gib", None)  # of another moment; the sum is what the engine subtracted
    if not {"kv_gib", "activation_gib"} & out.keys():
        return {}
    if "kv_gib" in out and "activation_gib" not in out and "weights_gib" in out and "free_gib" not in out:
        out.setdefault("non_torch_gib", 0.0)
    return out
