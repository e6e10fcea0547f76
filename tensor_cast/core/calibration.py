"""What an engine measured at start-up: read from its log, or from numbers in a YAML or JSON file.

Understood are the lines that vLLM (0.6 to 0.33), vllm-ascend and SGLang print about memory (:mod:`.engine_logs`). A log
with several workers gives one entry for each pipeline stage: the rank with least room for the KV cache.

A file of numbers looks like this; everything but ``stages`` may be left out, and is then as asked for::

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
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from tensor_cast.config_files import explain
from tensor_cast.core.engine_logs import GivenLayout, detect_format, split_starts, start_values
from tensor_cast.errors import ConfigError

__all__ = ["Calibration", "GivenLayout", "MeasuredStage", "read_calibration"]

#: No device has a PiB; what is beyond is garbled.
Gib = Annotated[float, Field(ge=0, le=2**20, allow_inf_nan=False)]


class MeasuredStage(BaseModel):
    """Memory of one pipeline stage in GiB, None where nothing was printed.

    Args:
        consumed_gib: weights, workspaces and what is outside the allocator, in one number.
        weights_gib: weights alone.
        non_torch_gib: outside the allocator.
        activation_gib: peak of the profile run; with ``consumed_gib`` it holds the estimate of the graphs that the
            engine subtracted, without it the buffers of the kernels.
        graph_gib: captured graphs.
        graph_estimate_gib: what the engine took them for before it captured them.
        kv_gib: available for the KV cache.
        free_gib: free before the weights were loaded (SGLang).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    consumed_gib: Gib | None = None
    weights_gib: Gib | None = None
    non_torch_gib: Annotated[float, Field(ge=-(2**20), le=2**20, allow_inf_nan=False)] | None = None
    activation_gib: Gib | None = None
    graph_gib: Gib | None = None
    graph_estimate_gib: Gib | None = None
    kv_gib: Gib | None = None
    free_gib: Gib | None = None

    @model_validator(mode="after")
    def _says_enough(self) -> Self:
        if (
            self.consumed_gib is None
            and self.weights_gib is None
            and (self.kv_gib is None or self.activation_gib is None)
        ):
            raise ValueError("needs consumed_gib; or weights_gib; or kv_gib with activation_gib")
        if self.kv_gib is None and self.activation_gib is None:
            raise ValueError("needs kv_gib or activation_gib")
        return self


class Calibration(BaseModel):
    """One start-up: its layout as far as it is known, and what each stage measured.

    Args:
        source: the file.
        engine: ``vllm``, ``vllm-ascend`` or ``sglang``; None for numbers.
        model: as the log names it.
        tp_size, pp_size, dp_size: of the measured run; None (numbers only) means as asked for.
        expert_parallel: whether whole experts are spread over the ranks.
        pp_layer_partition: layers of each stage; None means the engine's own rule.
        stages: by pipeline stage.
        kv_tokens: KV cache in tokens that the engine reported; ``num_blocks`` in blocks.
        notes: what the reader of the numbers should know.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    source: str = ""
    engine: Literal["vllm", "vllm-ascend", "sglang"] | None = None
    model: str | None = None
    tp_size: PositiveInt | None = None
    pp_size: PositiveInt | None = None
    dp_size: PositiveInt | None = None
    dcp_size: PositiveInt | None = None
    expert_parallel: bool | None = None
    pp_layer_partition: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] | None = None
    num_mtp_tokens: Annotated[int, Field(ge=0, le=256)] | None = None
    max_model_len: PositiveInt | None = None
    max_num_batched_tokens: PositiveInt | None = None
    kv_cache_dtype: str | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    total_gib: Annotated[Gib, Field(gt=0)] | None = None
    kv_tokens: PositiveInt | None = None
    num_blocks: PositiveInt | None = None
    stages: Annotated[tuple[MeasuredStage, ...], Field(min_length=1)]
    notes: tuple[str, ...] = ()


def read_calibration(path: str | Path, given: GivenLayout | None = None) -> Calibration:
    """The start-up in ``path``: a YAML or JSON mapping with ``stages``, else a log.

    Args:
        path: of the file.
        given: the layout of the measured run, as far as the file does not say it.

    Raises:
        ConfigError: the file cannot be read, holds neither, does not tell its layout, or is cut short.
    """
    file = Path(path).expanduser()
    given = given or GivenLayout()
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}; give a log or a YAML file") from error
    content = _mapping(file, text)
    if content is None:
        content = _log(file, text, given)
    for name, value in asdict(given).items():
        if value is None:
            continue
        said = content.setdefault(name, value)
        if said not in (value, list(value) if isinstance(value, tuple) else value):
            raise ConfigError(f"{file} says {name} {said}, --measured-{name.replace('_', '-')} {value}; leave one out")
    try:
        return Calibration.model_validate({"source": file.name, **content})
    except ValidationError as error:
        raise explain(file, error) from error


def _log(file: Path, text: str, given: GivenLayout) -> dict[str, Any]:
    """The last start in ``text`` that is complete."""
    form = detect_format(text)
    starts = split_starts(form, text)
    if not starts:
        raise ConfigError(
            f"{file}: no memory lines of vLLM, vllm-ascend or SGLang found (such as 'Available KV cache memory: "
            "15.56 GiB' or 'Actual usage is ...'); or give a YAML file with stages"
        )
    problem: ConfigError | None = None
    for start in reversed(starts):
        try:
            content = start_values(form, start, given)
        except ConfigError as error:
            problem = problem or error
            continue
        notes = []
        if len(starts) > 1:
            notes.append(f"{len(starts)} starts in the log: read is the one from line {start.first_line:,} on")
        if problem is not None:
            notes.append(f"a later start is left out: {problem}")
        return {**content, "notes": tuple(notes)}
    raise ConfigError(f"{file}: {problem}")


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
