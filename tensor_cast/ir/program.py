"""How a trace is put together from parts: which parts a layout needs, what each depends on, in what order they run.

The skeleton of a model is found once (:mod:`tensor_cast.tracer`): slots in program order, each filled by one part. A
part's key holds only the layout dimensions that its kind depends on, so that layouts share parts:

====================  ====================================================================================
glue, draft           nothing (norms, residual additions, rotary tables, the draft module's own projection)
embed, ffn            tp
head                  tp, and whether all tokens or only the last of each request are sampled
attention             tp, phase, block size and, under DCP, dcp, its semantics and interleave size
moe                   tp, dp, ep, moe_dp
====================  ====================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from tensor_cast.errors import ConfigError
from tensor_cast.ir.record import Part, Phase, Segment, Trace
from tensor_cast.model_config import ParallelConfig

#: Parts that are recorded with the skeleton, whatever the layout.
FIXED_ROLES = ("glue", "draft")


@dataclass(frozen=True, order=True)
class PartRequest:
    """Names one part: its role, which representative it belongs to, and the layout dimensions it depends on.

    Args:
        role: ``glue | draft | embed | attention | ffn | moe | head``.
        name: tells parts of one role apart, e.g. the representative layer ``"3"``.
        phase: of attention; of the head ``"all"`` or ``"last"`` (tokens sampled per request); else empty.
        dcp_semantics: empty when ``dcp`` is 1.
    """

    role: str
    name: str
    phase: str = ""
    tp: int = 1
    dcp: int = 1
    dcp_semantics: str = ""
    interleave: int = 1
    block_size: int = 0
    dp: int = 1
    ep: int = 1
    moe_dp: int = 1

    @property
    def key(self) -> str:
        """Readable and unique, e.g. ``attention/3/decode/tp8/bs128/dcp4.vllm-ascend.i1``."""
        words = [self.role, self.name]
        if self.phase:
            words.append(self.phase)
        if self.role not in FIXED_ROLES:
            words.append(f"tp{self.tp}")
        if self.block_size:
            words.append(f"bs{self.block_size}")
        if self.dcp > 1:
            words.append(f"dcp{self.dcp}.{self.dcp_semantics}.i{self.interleave}")
        if self.role == "moe":
            words += [f"dp{self.dp}", f"ep{self.ep}", f"moedp{self.moe_dp}"]
        return "/".join(words)


@dataclass(frozen=True)
class Layout:
    """Everything a trace of a given model depends on."""

    parallel: ParallelConfig
    phase: Phase
    dcp_semantics: str
    block_size: int
    num_mtp_tokens: int = 0

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.num_mtp_tokens < 0:
            raise ConfigError(
                f"block_size must be positive and num_mtp_tokens not negative; "
                f"have {self.block_size} and {self.num_mtp_tokens}"
            )

    @property
    def dcp(self) -> int:
        """Ways the context is split; a prefill step always runs with 1."""
        return 1 if self.phase is Phase.PREFILL else self.parallel.decode_context_parallel_size

    def axes(self) -> dict[str, int]:
        """Sizes by axis name, for display."""
        p = self.parallel
        return {
            "tp": p.tensor_parallel_size,
            "pp": p.pipeline_parallel_size,
            "dp": p.data_parallel_size,
            "ep": p.expert_parallel_size,
            "moe_tp": p.moe_tensor_parallel_size,
            "moe_dp": p.moe_data_parallel_size,
            "dcp": self.dcp,
        }


@dataclass(frozen=True)
class Slot:
    """A place in the program. ``layers`` is empty outside the layer stack."""

    role: str
    name: str
    layers: tuple[int, ...] = ()

    def request(self, layout: Layout, *, phase: Phase | None = None, last_token: bool | None = None) -> PartRequest:
        """The part that fills the slot under ``layout``.

        Args:
            layout: the sizes.
            phase: overrides the layout's phase (later passes of a draft module decode even after a prefill).
            last_token: whether only the last token of each request is sampled; by default in prefill only.
        """
        parallel = layout.parallel
        tp = parallel.tensor_parallel_size
        phase = phase or layout.phase
        tokens = "last" if (phase is Phase.PREFILL if last_token is None else last_token) else "all"
        match self.role:
            case "embed" | "ffn":
                return PartRequest(self.role, self.name, tp=tp)
            case "head":
                return PartRequest(self.role, self.name, tokens, tp=tp)
            case "tail":
                return PartRequest("glue", f"{self.name}.{tokens}")
            case "attention":
                request = PartRequest(self.role, self.name, str(phase), tp=tp, block_size=layout.block_size)
                if layout.dcp > 1 and phase is Phase.DECODE:
                    return replace(
                        request,
                        dcp=layout.dcp,
                        dcp_semantics=layout.dcp_semantics,
                        interleave=parallel.cp_kv_cache_interleave_size,
                    )
                return request
            case "moe":
                return PartRequest(
                    self.role,
                    self.name,
                    tp=tp,
                    dp=parallel.data_parallel_size,
                    ep=parallel.expert_parallel_size,
                    moe_dp=parallel.moe_data_parallel_size,
                )
            case _:
                return PartRequest(self.role, self.name)


@dataclass(frozen=True)
class Skeleton:
    """The program of a model without its layout: slots in order and the parts that no layout changes.

    Args:
        slots: the model itself.
        draft: the first pass of the draft (MTP) module, over the step's tokens; empty when the model has none.
        redraft: each later pass, over one token per request.
        fixed: parts of the roles in :data:`FIXED_ROLES`.
        replicated: modules left whole on every rank by the shard plan.
    """

    slots: tuple[Slot, ...]
    draft: tuple[Slot, ...]
    redraft: tuple[Slot, ...]
    fixed: tuple[Part, ...]
    replicated: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def plan(self, layout: Layout) -> Iterator[tuple[PartRequest, tuple[int, ...], int | None]]:
        """``(part, layers, query_len)`` of every segment in program order.

        The draft module runs once over the step's tokens and then once per further draft token, one token at a time.

        Raises:
            ConfigError: draft tokens are asked of a model that has no draft module.
        """
        for slot in self.slots:
            yield slot.request(layout), slot.layers, None
        if layout.num_mtp_tokens == 0:
            return
        if not self.draft:
            raise ConfigError(
                f"num_mtp_tokens is {layout.num_mtp_tokens}, but the model has no MTP layers "
                "(num_nextn_predict_layers is 0 or absent); use 0"
            )
        for slot in self.draft:
            yield slot.request(layout, last_token=True), slot.layers, None
        for _ in range(layout.num_mtp_tokens - 1):
            for slot in self.redraft:
                yield slot.request(layout, phase=Phase.DECODE, last_token=True), slot.layers, 1


def compose(model_id: str, skeleton: Skeleton, layout: Layout, parts: Mapping[str, Part]) -> Trace:
    """The trace of one layout. ``parts`` maps each needed key to its part."""
    tp = layout.parallel.tensor_parallel_size
    segments = tuple(
        Segment(parts[request.key], layers, query_len) for request, layers, query_len in skeleton.plan(layout)
    )
    return Trace(
        model_id=model_id,
        phase=layout.phase,
        layout=layout.axes(),
        segments=tuple(s for s in segments if s.part.ops or s.part.params),
        replicated=skeleton.replicated if tp > 1 else (),
        notes=skeleton.notes,
    )
