"""One start brought together: a set of values for each pipeline stage, those of the rank with least room."""

from __future__ import annotations

from typing import Any

from tensor_cast.core.engine_logs.format import LogFormat, Who
from tensor_cast.core.engine_logs.layout import GivenLayout, RunLayout, run_layout
from tensor_cast.core.engine_logs.starts import Start
from tensor_cast.errors import ConfigError

__all__ = ["start_values"]

Values = dict[str, float]

#: Quantities without which a stage says nothing.
_USED = ("consumed_gib", "weights_gib")
_KEPT = ("kv_gib", "activation_gib")
#: Facts of a log that serve to tell the layout only.
_INTERNAL = ("dp_attention", "tp_size", "pp_size", "dp_size", "expert_parallel")


def start_values(form: LogFormat, start: Start, given: GivenLayout) -> dict[str, Any]:
    """What one start says, by field of a :class:`Calibration`.

    Raises:
        ConfigError: its layout cannot be told, a stage is missing or says too little, or a number is garbled.
    """
    if start.problem is not None:
        raise start.problem
    layout = run_layout(form, start, given)
    stages = [_stage(form, values, i, layout) for i, values in enumerate(_by_stage(start, layout))]
    run = {name: value for name, value in start.run.items() if name not in _INTERNAL}
    experts = start.run.get("expert_parallel", any("ep" in who.axes for who in start.names.values()))
    return {
        **run,
        "engine": form.engine,
        "tp_size": layout.tp_size,
        "pp_size": layout.pp_size,
        "dp_size": layout.dp_size,
        "expert_parallel": experts,
        "stages": stages,
    }


def _by_stage(start: Start, layout: RunLayout) -> list[list[Values]]:
    stages: list[list[Values]] = [[] for _ in range(layout.pp_size)]
    unsigned = 0
    for record in start.ranks.values():
        stage = layout.stage(record.who)
        if stage is None:
            raise ConfigError(
                f"the run had {layout.pp_size} pipeline stages, and memory lines carry no name of a rank, so that "
                "their stage cannot be told; keep what the engine prints before them, such as (Worker_PP0_TP0 pid=1), "
                "or give the numbers in a YAML file"
            )
        if stage >= layout.pp_size:
            raise ConfigError(f"the run had {layout.pp_size} pipeline stages, yet lines of stage {stage}")
        unsigned += record.who == Who(nth=record.who.nth)
        stages[stage].append(record.values)
    ranks = layout.tp_size * layout.dp_size
    if unsigned > ranks:
        raise ConfigError(
            f"it holds {unsigned} different accounts of memory that no rank signed, of a run with {ranks} "
            "rank(s): keep those of one start"
        )
    return stages


def _stage(form: LogFormat, ranks: list[Values], index: int, layout: RunLayout) -> Values:
    """Values of the rank with least room for the KV cache: those of one rank add up."""
    where = f"stage {index} of the measured run" if layout.pp_size > 1 else "the measured run"
    if not any(ranks):
        raise ConfigError(
            f"{where} (TP{layout.tp_size} PP{layout.pp_size}) is missing: no line says what its "
            f"ranks use. Was the log cut short? Keep all ranks up to '{form.ends_with}'"
        )
    if any("reserved_gib" in values for values in ranks):
        raise ConfigError(
            f"{where} was given its KV memory (--kv-cache-memory), so the engine measured nothing "
            "else; start it without, or give numbers in a YAML file"
        )
    if any(values.get("kv_gib", 0.0) < 0 for values in ranks):
        raise ConfigError(f"{where} had no room for a KV cache ({min(v.get('kv_gib', 0.0) for v in ranks):.2f} GiB)")
    full = [v for v in ranks if _says(v, _USED) and _says(v, _KEPT)]
    chosen = min(full, key=_room) if full else {}
    # What only some ranks print: the worst of them.
    merged: Values = {}
    for values in ranks:
        for name, value in values.items():
            worst = min if name in ("kv_gib", "free_gib") else max
            merged[name] = worst(merged.get(name, value), value)
    merged |= chosen
    if not (_says(merged, _USED) and _says(merged, _KEPT)):
        found = ", ".join(f"{name.removesuffix('_gib')} {value:.2f}" for name, value in merged.items())
        raise ConfigError(
            f"{where} says too little: found {found} GiB; needed are weights, and the KV memory or "
            f"the activation peak. Was the log cut short? Keep all ranks up to '{form.ends_with}'"
        )
    return merged


def _says(values: Values, names: tuple[str, ...]) -> bool:
    return any(name in values for name in names)


def _room(values: Values) -> tuple[float, float]:
    used = sum(values.get(name, 0.0) for name in ("consumed_gib", "weights_gib", "non_torch_gib", "activation_gib"))
    return values.get("kv_gib", -used), -used
