"""Decode context parallelism: three readings of it, each a strategy object.

DCP splits the KV cache of a sequence over ``dcp`` consecutive ranks of a TP group. In decode each layer gathers the
query heads of its DCP group, attends over the local part of the sequence, and merges the partial results:

================ ================================== =============================== ==============================
..               ``vllm-ascend``                    ``vllm``                        ``rfc``
================ ================================== =============================== ==============================
GQA, dcp > 1     tp > h_kv, dcp <= tp // h_kv, dcp divides tp // h_kv and h / h_kv  h_kv >= tp / dcp
local KV heads   max(1, h_kv // tp)                 max(1, h_kv // tp)              h_kv * dcp / tp
collectives      all_gather Q, all_to_all of        all_gather Q, all_gather lse,   all_gather Q, all_to_all of
..               out and lse in float32             reduce_scatter out              out and lse in float32
merged, MLA      latent (kv_lora_rank), W_UV after  latent, W_UV after              v_head_dim, W_UV before
DSA, indexer     its cache whole on every rank      its cache split too; where a    not covered: refused
..               (dcp = tp only)                    layer chooses, all_gather of
..                                                  each rank's best (score, id)
DSA, merge       all_to_all of out in the model's   as above
..               dtype, all_to_all of lse
================ ================================== =============================== ==============================

Sources: vLLM 0.28 to 0.33 (config/parallel.py, config/model.py, attention layers), vllm-ascend main of August 2026
(attention/context_parallel), and the RFC this product implements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from tensor_cast.dtypes import bytes_of
from tensor_cast.errors import LegalityError
from tensor_cast.model_config import AttentionKind, ModelConfig
from tensor_cast.registry import Registry

__all__ = ["SEMANTICS", "Collective", "DcpSemantics", "get_semantics", "local_tokens", "owner", "semantics_names"]

_ALL_GATHER = "all_gather_into_tensor"
_ALL_TO_ALL = "all_to_all_single"
_REDUCE_SCATTER = "reduce_scatter_tensor"

#: With this many query heads on a rank vLLM's sparse attention takes a kernel that cannot be merged over DCP ranks. (It
#: also wants an fp8 cache and 512, 1,024 or 2,048 chosen tokens, which every published model has.)
_SPARSE_HEADS = 32


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a decode layer, per query token and rank.

    Args:
        op: name of the functional collective, as a trace has it.
        what: what it moves: ``q``, ``out``, ``lse``, ``out+lse`` or ``candidates`` of an indexer.
        elements: of the local input buffer.
        dtype: of the buffer.
    """

    op: str
    what: str
    elements: int
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the local input buffer."""
        return int(self.elements * bytes_of(self.dtype))


class DcpSemantics(ABC):
    """What one reading of DCP allows and does. Stateless; looked up by name with :func:`get_semantics`."""

    name: ClassVar[str]
    #: Whether MLA merges partial results in latent space (kv_lora_rank wide) and applies W_UV afterwards.
    merges_latent: ClassVar[bool]
    #: Collective that brings the partial outputs together.
    merge_op: ClassVar[str]
    #: dtype of the partial outputs on the wire; None is the model's. The lse always travels in float32.
    merge_dtype: ClassVar[str | None]
    #: Whether each rank keeps the indexer keys of the whole sequence (sparse attention).
    replicates_indexer: ClassVar[bool] = False

    def violations(self, model: ModelConfig, tp: int, dcp: int) -> list[LegalityError]:
        """Rules about heads that (tp, dcp) breaks for ``model``; empty if it is legal. dcp = 1 always is."""
        if dcp == 1:
            return []
        if tp % dcp:
            return [
                LegalityError(
                    "dcp.divides_tp",
                    "dcp_size <= tp_size and tp_size % dcp_size = 0 (DCP groups are slices of the TP group)",
                    f"tp_size {tp}, dcp_size {dcp}",
                    f"set tp_size to a multiple of {dcp}, or dcp_size to a divisor of {tp}",
                )
            ]
        if model.attention is AttentionKind.GQA:
            return self._gqa_violations(model.num_attention_heads, model.num_key_value_heads, tp, dcp)
        return []

    @abstractmethod
    def _gqa_violations(self, h: int, h_kv: int, tp: int, dcp: int) -> list[LegalityError]:
        """Rules for ``h`` query and ``h_kv`` KV heads; ``dcp`` is more than 1 and divides ``tp``."""

    @abstractmethod
    def local_kv_heads(self, h_kv: int, tp: int, dcp: int) -> int:
        """KV heads in the cache of one rank (GQA)."""

    def kv_shards(self, h_kv: int, tp: int, dcp: int) -> float:
        """How many times smaller than with dcp = 1 the KV bytes of a sequence are on one rank (GQA).

        Each rank holds ``1/dcp`` of the tokens, of :meth:`local_kv_heads` heads.
        """
        return dcp * self.local_kv_heads(h_kv, tp, 1) / self.local_kv_heads(h_kv, tp, dcp)

    def merge_width(self, model: ModelConfig) -> int:
        """Elements per head of a partial output when it is merged."""
        if model.attention is AttentionKind.GQA or not self.merges_latent:
            return model.v_head_dim
        return model.kv_lora_rank

    def collectives(self, model: ModelConfig, tp: int, dcp: int, *, dtype: str | None = None) -> tuple[Collective, ...]:
        """Collectives of one decode layer, in order, each per query token and rank; none for dcp = 1.

        Args:
            model: facts of the model.
            tp: ranks that share the query heads.
            dcp: ranks that share a sequence, a divisor of ``tp``.
            dtype: of the activations; None takes the model's.
        """
        if dcp == 1:
            return ()
        dtype = dtype or model.dtype
        latent = model.attention is not AttentionKind.GQA
        query_dim = model.kv_lora_rank + model.qk_rope_head_dim if latent else model.head_dim
        heads = model.num_attention_heads // tp
        gather = Collective(_ALL_GATHER, "q", heads * query_dim, dtype)
        merge = self._sparse_merge if model.attention is AttentionKind.DSA else self._merge
        return (gather, *merge(heads * dcp, self.merge_width(model), dtype))

    def indexer_collectives(self, model: ModelConfig, dcp: int) -> tuple[Collective, ...]:
        """What a layer that chooses tokens (``ModelConfig.indexer_layers``) adds before them, likewise.

        Each rank's best ``index_topk`` local tokens as (score, id) in float32: with fewer tokens in its part of the
        context a rank hands in those.
        """
        if dcp == 1 or model.attention is not AttentionKind.DSA or self.replicates_indexer:
            return ()
        return (Collective(_ALL_GATHER, "candidates", 2 * model.index_topk, "float32"),)

    def _sparse_merge(self, heads: int, width: int, dtype: str) -> tuple[Collective, ...]:
        return self._merge(heads, width, dtype)

    def _merge(self, heads: int, width: int, dtype: str) -> tuple[Collective, ...]:
        # out and lse side by side: one more element per head.
        return (Collective(_ALL_TO_ALL, "out+lse", heads * (width + 1), self.merge_dtype or dtype),)


SEMANTICS: Registry[DcpSemantics] = Registry("DCP semantics")


def get_semantics(name: str) -> DcpSemantics:
    """The strategy called ``name``. Raises :class:`UnknownNameError` with what there is."""
    return SEMANTICS.get(name)


def semantics_names() -> tuple[str, ...]:
    """Names for ``--dcp-semantics``, the default first."""
    return tuple(SEMANTICS)


class _Engine(DcpSemantics):
    """What vLLM and vllm-ascend share: DCP splits the *copies* of KV heads that a TP group larger than h_kv holds."""

    merges_latent = True

    def _gqa_violations(self, h: int, h_kv: int, tp: int, dcp: int) -> list[LegalityError]:
        have = f"tp_size {tp}, dcp_size {dcp}, {h} query heads and {h_kv} KV heads"
        copies = tp // h_kv
        if tp <= h_kv:
            return [
                LegalityError(
                    "dcp.kv_heads",
                    "tp_size > num_key_value_heads: DCP splits copies of KV heads, and there are none",
                    have,
                    f"set dcp_size to 1 or tp_size to a multiple of {h_kv * dcp}",
                )
            ]
        if dcp > copies or copies % dcp:
            return [
                LegalityError(
                    "dcp.kv_copies",
                    f"dcp_size divides tp_size // num_key_value_heads = {copies}, the copies of each KV head",
                    have,
                    f"choose dcp_size from the divisors of {copies}",
                )
            ]
        if (h // h_kv) % dcp:
            return [
                LegalityError(
                    "dcp.query_heads",
                    f"dcp_size divides num_attention_heads / num_key_value_heads = {h // h_kv}",
                    have,
                    f"choose dcp_size from the divisors of {h // h_kv}",
                )
            ]
        return []

    def local_kv_heads(self, h_kv: int, tp: int, dcp: int) -> int:
        """``max(1, h_kv // tp)``: DCP changes who holds which tokens, not which heads."""
        return max(1, h_kv // tp)


class VllmAscend(_Engine):
    """vllm-ascend: one all-to-all of output and lse, both in float32."""

    name = "vllm-ascend"
    merge_op = _ALL_TO_ALL
    merge_dtype = "float32"
    replicates_indexer = True

    def _sparse_merge(self, heads: int, width: int, dtype: str) -> tuple[Collective, ...]:
        return (
            Collective(_ALL_TO_ALL, "out", heads * width, dtype),
            Collective(_ALL_TO_ALL, "lse", heads, "float32"),
        )

    def violations(self, model: ModelConfig, tp: int, dcp: int) -> list[LegalityError]:
        """As everywhere, and sparse attention shards its cache over the whole TP group or not at all."""
        found = super().violations(model, tp, dcp)
        if not found and dcp not in (1, tp) and model.attention is AttentionKind.DSA:
            found.append(
                LegalityError(
                    "dcp.sparse_attention",
                    "dcp_size of 1 or tp_size with sparse attention (SFA)",
                    f"tp_size {tp}, dcp_size {dcp}",
                    f"set dcp_size to 1 or {tp}",
                )
            )
        return found


class Vllm(_Engine):
    """vLLM on GPUs, default backend ``ag_rs``: lse gathered, outputs rescaled locally and reduce-scattered."""

    name = "vllm"
    merge_op = _REDUCE_SCATTER
    merge_dtype = None

    def violations(self, model: ModelConfig, tp: int, dcp: int) -> list[LegalityError]:
        """As everywhere, and sparse attention returns an lse only from the kernel that takes few heads."""
        found = super().violations(model, tp, dcp)
        total = model.num_attention_heads
        heads = total // tp
        if not found and dcp > 1 and model.attention is AttentionKind.DSA and heads >= _SPARSE_HEADS:
            least = next(ways for ways in range(tp, total + 1) if total % ways == 0 and total // ways < _SPARSE_HEADS)
            found.append(
                LegalityError(
                    "dcp.sparse_heads",
                    f"fewer than {_SPARSE_HEADS} query heads per rank with sparse attention (FlashMLA-sparse's path "
                    "for mixed batches)",
                    f"{total} query heads, tp_size {tp}: {heads} per rank",
                    f"set dcp_size to 1, or tp_size to {least} or more",
                )
            )
        return found

    def _merge(self, heads: int, width: int, dtype: str) -> tuple[Collective, ...]:
        return (
            Collective(_ALL_GATHER, "lse", heads, "float32"),
            Collective(_REDUCE_SCATTER, "out", heads * width, dtype),
        )


class Rfc(DcpSemantics):
    """The RFC to the letter.

    dcp = 1 is always legal, although its rule ``h_kv >= tp/dcp`` read literally would forbid it for tp > h_kv.
    """

    name = "rfc"
    merges_latent = False
    merge_op = _ALL_TO_ALL
    merge_dtype = "float32"

    def violations(self, model: ModelConfig, tp: int, dcp: int) -> list[LegalityError]:
        """As everywhere; sparse attention is not what the RFC describes."""
        if dcp > 1 and model.attention is AttentionKind.DSA:
            return [
                LegalityError(
                    "dcp.sparse_attention",
                    "attention over the whole context: the RFC says nothing of sparse attention (DSA, SFA)",
                    f"dcp_size {dcp}, {model.model_id} attends to {model.index_topk} chosen tokens",
                    "set dcp_size to 1, or dcp_semantics to vllm or vllm-ascend",
                )
            ]
        return super().violations(model, tp, dcp)

    def _gqa_violations(self, h: int, h_kv: int, tp: int, dcp: int) -> list[LegalityError]:
        have = f"tp_size {tp}, dcp_size {dcp}, {h_kv} KV heads"
        if h_kv * dcp < tp:
            return [
                LegalityError(
                    "dcp.kv_heads",
                    "num_key_value_heads >= tp_size / dcp_size: every rank needs a KV head to read",
                    have,
                    f"raise dcp_size to {-(-tp // h_kv)} or more, or lower tp_size",
                )
            ]
        if (h_kv * dcp) % tp:
            return [
                LegalityError(
                    "dcp.kv_heads_whole",
                    "num_key_value_heads * dcp_size a multiple of tp_size: a rank holds whole KV heads",
                    have,
                    "choose another dcp_size or tp_size",
                )
            ]
        return []

    def local_kv_heads(self, h_kv: int, tp: int, dcp: int) -> int:
        """``h_kv / (tp/dcp)``; with dcp = 1 as everywhere, ``max(1, h_kv // tp)``."""
        return max(1, h_kv * dcp // tp)


for _semantics in (VllmAscend(), Vllm(), Rfc()):
    SEMANTICS.register(_semantics.name)(_semantics)


# -- placement of tokens: the same under each reading ---------------------------------------------------------------


def owner(position: int, *, dcp: int, block_size: int, interleave: int = 1) -> int:
    """DCP rank that holds token ``position``: runs of ``interleave`` tokens go round the ranks."""
    return position % (block_size * dcp) // interleave % dcp


def local_tokens(tokens: int, rank: int, *, dcp: int, interleave: int = 1) -> int:
    """How many of a sequence's first ``tokens`` tokens DCP rank ``rank`` holds. Rank 0 holds the most."""
    whole_rounds = tokens // interleave // dcp * interleave
    rest = tokens - whole_rounds * dcp - rank * interleave
    return whole_rounds + min(max(rest, 0), interleave)
