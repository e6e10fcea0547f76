"""Traces of one model for any layout: from memory, else from disk, else traced."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tensor_cast.engine.dcp import get_semantics
from tensor_cast.ir.cache import TraceCache, default_cache_dir
from tensor_cast.ir.index_sharing import Handover
from tensor_cast.ir.program import Layout, PartRequest, Skeleton, compose
from tensor_cast.ir.record import Part, Phase, Trace
from tensor_cast.ir.stages import stage_traces
from tensor_cast.model_config import ModelConfig, ParallelConfig

if TYPE_CHECKING:
    from tensor_cast.tracer.trace import ModelTracer


@contextmanager
def _no_collector() -> Iterator[None]:
    """Loading torch and tracing leave little to collect; looking for it all the while takes a tenth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class TraceLibrary:
    """Composes traces of ``model``; parts are shared between layouts, in memory and on disk.

    Equal part keys give the same :class:`Part` object, so whatever is derived from a part can be kept by its key.

    Args:
        model: the model.
        cache_dir: where traced parts are kept; the user's cache directory when absent.
        use_cache: whether to read and write there at all.
    """

    def __init__(self, model: ModelConfig, *, cache_dir: Path | None = None, use_cache: bool = True) -> None:
        self.model = model
        self._cache = TraceCache(cache_dir or default_cache_dir(), model.digest) if use_cache else None
        self._parts: dict[str, Part] = {}
        self._skeleton: Skeleton | None = None
        self._tracer_made: ModelTracer | None = None

    def trace(
        self,
        parallel: ParallelConfig,
        phase: Phase,
        *,
        dcp_semantics: str,
        block_size: int,
        num_mtp_tokens: int = 0,
    ) -> Trace:
        """The trace of one layout and phase; a prefill is traced with dcp = 1 whatever ``parallel`` says.

        Raises:
            UnsupportedModelError: the model cannot be traced.
            ConfigError: draft tokens are asked of a model without MTP layers.
            LegalityError: the layout does not fit the model.
            UnknownNameError: no such DCP semantics.
        """
        layout = Layout(parallel, phase, get_semantics(dcp_semantics).name, block_size, num_mtp_tokens)
        return self.compose(layout)

    def stages(
        self,
        layout: Layout,
        partition: Sequence[int],
        *,
        whole_on_wire: bool = False,
        handover: Handover | None = None,
    ) -> tuple[Trace, ...]:
        """The trace of each pipeline stage of ``layout``; see :func:`tensor_cast.ir.stages.stage_traces`.

        Args:
            layout: as of :meth:`compose`.
            partition: layers of each stage.
            whole_on_wire: every rank sends the boundary tensors whole.
            handover: what is done where a stage lacks top-k indices.

        Raises:
            LegalityError: the partition does not fit the model; else as :meth:`trace`.
        """
        return stage_traces(
            self.compose(layout),
            partition,
            hidden_size=self.model.hidden_size,
            dtype=self.model.dtype,
            tp=layout.parallel.tensor_parallel_size,
            num_mtp_tokens=layout.num_mtp_tokens,
            whole_on_wire=whole_on_wire,
            handover=handover,
        )

    def compose(self, layout: Layout) -> Trace:
        """Same as :meth:`trace` for a ready :class:`Layout`."""
        self.prefetch([layout])
        return compose(self.model.model_id, self.skeleton, layout, self._parts)

    def prefetch(self, layouts: Iterable[Layout]) -> None:
        """Have every part ready that the layouts need. Raises as :meth:`trace`."""
        needed: dict[str, PartRequest] = {}
        for layout in layouts:
            needed.update((request.key, request) for request, _, _ in self.skeleton.plan(layout))
        with _no_collector():
            for key, request in needed.items():
                if key not in self._parts:
                    self._parts[key] = self._part(request)

    @property
    def skeleton(self) -> Skeleton:
        """The program without its layout."""
        if self._skeleton is None:
            found = self._cache.load_skeleton() if self._cache else None
            if found is None:
                with _no_collector():
                    found = self._tracer().skeleton()
                if self._cache:
                    self._cache.store_skeleton(found)
            self._skeleton = found
            self._parts.update((part.key, part) for part in found.fixed)
        return self._skeleton

    def _part(self, request: PartRequest) -> Part:
        found = self._cache.load_part(request.key) if self._cache else None
        if found is None:
            found = self._tracer().part(request)
            if self._cache:
                self._cache.store_part(found)
        return found

    def _tracer(self) -> ModelTracer:
        """The tracer, made when something is missing: this is where torch is imported."""
        if self._tracer_made is None:
            with _no_collector():
                from tensor_cast.tracer.trace import ModelTracer

            self._tracer_made = ModelTracer(self.model)
        return self._tracer_made
