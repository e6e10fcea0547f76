"""The answer of one search: best, candidates, Pareto front, rejections; as JSON, as CSV rows, and in words."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from serving_cast.config import Limits, Mode, OptimizerConfig
from serving_cast.service.pd_ratio import PdChoice
from serving_cast.service.rows import Rejection, Row
from serving_cast.service.search import nearest
from serving_cast.service.utils import DISAGG_COLUMNS, format_parallel_label
from serving_cast.setting import Setting
from tensor_cast.pipeline_partition import spell

__all__ = ["SCHEMA_VERSION", "FailedSummary", "OptimizerSummary", "Summary", "document", "table_rows"]

#: Version of the JSON output; raised when a key changes its meaning or goes away.
SCHEMA_VERSION = 1

#: Beside the row itself: its limits, whether it is the answer, and in PD-ratio mode how many instances of it.
_CSV_COLUMNS = (*DISAGG_COLUMNS, "ttft_limit_ms", "tpot_limit_ms", "best", "instances", "kv_transfer_ms")


@dataclass(frozen=True)
class OptimizerSummary:
    """What one search of one device under one set of limits found.

    Args:
        candidates: the best row of every feasible layout (and phase), best first.
        pareto: rows that no other row beats in one aim without losing in the other.
        rejections: layouts that are out, and why.
        choice: instances and their counts, of the PD-ratio mode.
    """

    setting: Setting
    limits: Limits
    candidates: tuple[Row, ...]
    pareto: tuple[Row, ...]
    rejections: tuple[Rejection, ...]
    choice: PdChoice | None = None

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases that need a row each."""
        return ("aggregated",) if self.setting.config.mode is Mode.AGGREGATED else ("prefill", "decode")

    def best_of(self, phase: str) -> Row | None:
        """The best row of one phase."""
        return next((row for row in self.candidates if row.phase == phase), None)

    @property
    def feasible(self) -> bool:
        """Whether every phase has a row (and, in PD-ratio mode, the instances fit the devices)."""
        if self.setting.config.mode is Mode.PD_RATIO:
            return self.choice is not None
        return all(self.best_of(phase) is not None for phase in self.phases)

    def best_json(self) -> dict[str, Any] | None:
        """The best as a JSON object: a row, a row per phase, or the PD choice; None where nothing is feasible."""
        mode = self.setting.config.mode
        if mode is Mode.PD_RATIO:
            return None if self.choice is None else self.choice.to_json()
        rows = {phase: self.best_of(phase) for phase in self.phases}
        if not any(rows.values()):
            return None
        as_json = {phase: None if row is None else row.to_json() for phase, row in rows.items()}
        return as_json["aggregated"] if mode is Mode.AGGREGATED else as_json

    def inputs(self) -> dict[str, Any]:
        """Every input, names resolved and defaults filled in."""
        s = self.setting
        return s.config.echo() | {
            "device": s.device.name,
            "engine": s.engine.name,
            "dcp_semantics": s.dcp_semantics,
            "block_size": s.block_size,
            "cp_kv_cache_interleave_size": s.interleave,
            "max_batched_tokens": s.budget,
            "max_num_seqs": s.max_num_seqs,
            "pp_extra_batches": s.engine.pp_extra_batches,
            "max_position_embeddings": s.model.max_position_embeddings,
            "kv_dtype": s.quant.kv_dtype,
            "quantization": s.quant.source,
            "ttft_limit": self.limits.ttft_ms,
            "tpot_limit": self.limits.tpot_ms,
        }

    def to_json(self) -> dict[str, Any]:
        """The public JSON form."""
        return {
            "schema_version": SCHEMA_VERSION,
            "inputs": self.inputs(),
            "best": self.best_json(),
            "message": self.message(),
            "candidates": [row.to_json() for row in self.candidates],
            "pareto": [row.to_json() for row in self.pareto],
            "rejections": [rejection.to_json() for rejection in self.rejections],
        }

    def csv_rows(self) -> Iterator[list[Any]]:
        """The answer first: each phase's best row, or the two sides of the PD choice; then the other candidates."""
        choice = self.choice
        if choice is not None:
            yield self._csv(choice.prefill, True, choice.x, choice.kv_transfer_ms)
            yield self._csv(choice.decode, True, choice.y, choice.kv_transfer_ms)
        ratio = self.setting.config.mode is Mode.PD_RATIO
        for row in self.candidates:
            yield self._csv(row, not ratio and row is self.best_of(row.phase))

    def _csv(self, row: Row, best: bool, instances: int | None = None, transfer: float | None = None) -> list[Any]:
        values = row.to_json()
        limits = [self.limits.ttft_ms, self.limits.tpot_ms]
        return [*(_cell(values[name]) for name in DISAGG_COLUMNS), *limits, best, instances, transfer]

    def message(self) -> str:
        """One line: nothing while all is well, else what is nearest to feasible and by how much it misses."""
        if self.feasible:
            notes = (
                self._idle_note(),
                self._length_note(),
                self._wait_note(),
                self._unsafe_note(),
                self._indexer_note(),
            )
            return "; ".join(note for note in notes if note)
        config = self.setting.config
        where = f"{config.num_devices} x {self.setting.device.name}"
        parts = [self._nearest_text(phase) for phase in self.phases if self.best_of(phase) is None]
        if not parts:
            parts = ["each phase alone is feasible, but no pair of instances fits the devices and the TTFT limit"]
        return f"nothing is feasible for {config.model} on {where}: {'; '.join(parts)}"

    def _nearest_text(self, phase: str) -> str:
        found = nearest(r for r in self.rejections if r.phase == phase)
        prefix = f"{phase}: " if len(self.phases) > 1 else ""
        if found is None:
            return f"{prefix}no layout to try; check the size lists and the number of devices"
        label = format_parallel_label(found.parallel)
        return (
            f"{prefix}nearest is {label}, which needs {found.need} but has {found.have} [{found.rule}]; {found.remedy}"
        )

    def _unsafe_note(self) -> str:
        """Layouts that compute something else than the model, and why they are listed all the same."""
        row = next((row for row in (*self._best_rows, *self.candidates) if row.unsafe_layers), None)
        if row is None:
            return ""
        layers = _layers(row.unsafe_layers, "reads", "read")
        return (
            f"UNSAFE: {self._where(row)}{layers} top-k indices that were never written on the stage; outputs are "
            "wrong, priced as --dsa-split unsafe asks"
        )

    def _indexer_note(self) -> str:
        """Layers that were given an indexer, in the answer or a row shown below it."""
        shown = (*self._best_rows, *self.candidates[: self.setting.config.top])
        row = next((row for row in shown if row.own_indexer_layers), None)
        if row is None:
            return ""
        layers = _layers(row.own_indexer_layers, "gets", "get")
        whose = "its" if len(row.own_indexer_layers) == 1 else "their"
        return f"{self._where(row)}{layers} an indexer of {whose} own, as --dsa-split self-compute asks"

    @property
    def _best_rows(self) -> tuple[Row, ...]:
        """The rows of the answer."""
        if self.choice is not None:
            return self.choice.prefill, self.choice.decode
        return tuple(row for row in map(self.best_of, self.phases) if row is not None)

    def _where(self, row: Row) -> str:
        """Which row a note speaks of; nothing where it is the only one of the answer."""
        if self._best_rows == (row,):
            return ""
        return f"in {row.parallel} with partition {spell(row.pp_layer_partition or ())} "

    def _wait_note(self) -> str:
        """Requests that wait longer for their first token than all of them then take, where no limit was set on it.

        By Little's law more of them wait than decode then.
        """
        w = self.setting.workload
        for row in self._best_rows:
            if self.limits.ttft_ms is None and row.ttft_ms is not None and row.tpot_ms is not None:
                decoding = row.tpot_ms * w.output_length
                if row.ttft_ms > decoding:
                    return (
                        f"TTFT {row.ttft_ms / 1e3:,.3g} s exceeds the {decoding / 1e3:,.3g} s in which the "
                        f"{w.output_length:,} tokens then come: more requests wait than decode; --ttft-limit bounds it"
                    )
        return ""

    def _length_note(self) -> str:
        total, longest = self.setting.workload.total_tokens, self.setting.model.max_position_embeddings
        if total <= longest:
            return ""
        return f"a request of {total} tokens is longer than the model's max_position_embeddings {longest}"

    def _idle_note(self) -> str:
        total = self.setting.config.num_devices
        if self.choice is not None:
            idle, what = total - self.choice.devices_used, f"{self.choice.x}P{self.choice.y}D"
        else:
            row = self.candidates[0]
            idle, what = total - row.replicas * row.tp * row.pp * row.dp, f"{row.replicas} x {row.parallel}"
        return f"{idle} of {total} devices stay idle with {what}" if idle else ""


@dataclass(frozen=True)
class FailedSummary:
    """In place of a summary: one device of several that cannot run the model at all, and why."""

    config: OptimizerConfig
    device: str
    limits: Limits
    error: str

    feasible = False
    candidates: ClassVar[tuple[Row, ...]] = ()

    def message(self) -> str:
        """One line: what keeps the device from running the model."""
        return f"{self.config.model} does not run on {self.device}: {self.error}"

    def to_json(self) -> dict[str, Any]:
        """The public JSON form, with nothing found."""
        inputs = {"device": self.device, "ttft_limit": self.limits.ttft_ms, "tpot_limit": self.limits.tpot_ms}
        return {
            "schema_version": SCHEMA_VERSION,
            "inputs": self.config.echo() | inputs,
            "best": None,
            "message": self.message(),
            "candidates": [],
            "pareto": [],
            "rejections": [],
        }

    def csv_rows(self) -> Iterator[list[Any]]:
        """No rows."""
        yield from ()


Summary = OptimizerSummary | FailedSummary


def _layers(layers: Sequence[int], one: str, several: str) -> str:
    """``layer 41 gets`` or ``layers 40,41 get``."""
    return f"layer {spell(layers)} {one}" if len(layers) == 1 else f"layers {spell(layers)} {several}"


def _cell(value: Any) -> Any:
    """Lists as CSV has them: numbers as options take them, objects as JSON."""
    if isinstance(value, list) and all(isinstance(item, int) for item in value):
        return spell(value)
    return json.dumps(value) if isinstance(value, list | dict) else value


def document(summaries: Sequence[Summary]) -> dict[str, Any]:
    """One JSON document: the summary itself, or a list of ``results`` where there are several scenarios."""
    if len(summaries) == 1:
        return summaries[0].to_json()
    return {"schema_version": SCHEMA_VERSION, "results": [summary.to_json() for summary in summaries]}


def table_rows(summaries: Iterable[Summary]) -> tuple[tuple[str, ...], list[list[Any]]]:
    """Header and rows of the CSV form: the answer and every candidate of every scenario, with its limits."""
    return _CSV_COLUMNS, [row for summary in summaries for row in summary.csv_rows()]
