"""Which layouts are legal, and which ranks form a group.

Each rule has a stable id; a violation says what is needed, what there is, and what to change. Rank order is
dp > pp > tp with tp fastest: global rank ``(dp * pp_size + pp) * tp_size + tp``. DCP groups are consecutive slices of a
TP group, an expert group spans the tp * dp ranks of one pipeline stage.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import ParamSpec

from tensor_cast.engine.dcp import get_semantics
from tensor_cast.errors import LegalityError
from tensor_cast.hf_config import no_drafts
from tensor_cast.ir.record import Phase
from tensor_cast.model_config import AttentionKind, ModelConfig, ParallelConfig
from tensor_cast.units import round_up

__all__ = ["AXES", "axis_ranks", "check", "violations"]

#: Names of the parallel axes, as collectives in a trace carry them.
AXES = ("tp", "dcp", "dp", "pp", "ep", "moe_tp", "moe_dp")

#: Engines pad the vocabulary to a multiple of this before they split it.
VOCAB_PADDING = 64

P = ParamSpec("P")


def axis_ranks(parallel: ParallelConfig, axis: str, *, stage: int = 0) -> tuple[int, ...]:
    """Global ranks of the group of ``axis`` that the first rank of a pipeline stage belongs to, in group order.

    Args:
        parallel: the layout.
        axis: one of :data:`AXES`.
        stage: pipeline stage; the groups of later stages may lie differently over the nodes.

    Raises:
        ValueError: ``axis`` is none of :data:`AXES`.
    """
    tp, pp, dp = (
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.data_parallel_size,
    )
    first = stage * tp
    # Ranks of the stage in the order in which experts are laid out: moe_dp > ep > moe_tp.
    members = tuple(d * pp * tp + first + t for d in range(dp) for t in range(tp))
    moe_tp, ep = parallel.moe_tensor_parallel_size, parallel.expert_parallel_size
    match axis:
        case "tp":
            return tuple(range(first, first + tp))
        case "dcp":
            return tuple(range(first, first + parallel.decode_context_parallel_size))
        case "dp":
            return tuple(d * pp * tp + first for d in range(dp))
        case "pp":
            return tuple(p * tp for p in range(pp))
        case "ep":
            return members[::moe_tp][:ep]
        case "moe_tp":
            return members[:moe_tp]
        case "moe_dp":
            return members[:: moe_tp * ep]
    raise ValueError(f"unknown parallel axis {axis!r}; known: {', '.join(AXES)}")


def violations(
    model: ModelConfig,
    parallel: ParallelConfig,
    *,
    dcp_semantics: str,
    block_size: int,
    quant_block: int | None = None,
    num_mtp_tokens: int = 0,
    phase: Phase = Phase.DECODE,
    num_devices: int | None = None,
    free_experts: bool = False,
    kv_transfer: bool = False,
) -> list[LegalityError]:
    """Every rule that the layout breaks; empty if it is legal.

    Args:
        model: facts of the model.
        parallel: sizes of the axes of one instance.
        dcp_semantics: see :mod:`tensor_cast.engine.dcp`.
        block_size: tokens per physical KV block.
        quant_block: side of the blocks that share a scale (128 for block fp8), None or 0 without.
        num_mtp_tokens: draft tokens per step.
        phase: prefill ignores ``decode_context_parallel_size``: it always runs with 1.
        num_devices: devices there are; None leaves the rule out.
        free_experts: the engine lets ep be any divisor of tp * dp and replicates experts
            (:attr:`EngineProfile.moe_data_parallel`).
        kv_transfer: the KV cache moves between instances, as with disaggregated prefill.

    Raises:
        UnknownNameError: no such ``dcp_semantics``.
    """
    semantics = get_semantics(dcp_semantics)
    sizes = list(_sizes(parallel, num_devices))
    if sizes:
        return sizes  # the other rules divide by these
    found = [*_heads(model, parallel), *_dense(model, parallel), *_experts(model, parallel, free_experts)]
    if quant_block:
        found += _blocks(model, parallel, quant_block)
    if parallel.pipeline_parallel_size > model.num_hidden_layers:
        found.append(
            LegalityError(
                "pp.layers",
                "a layer for each pipeline stage",
                f"pp_size {parallel.pipeline_parallel_size}, {model.num_hidden_layers} layers",
                f"lower pp_size to {model.num_hidden_layers} or less",
            )
        )
    if num_mtp_tokens and not model.num_nextn_predict_layers:
        found.append(
            LegalityError(
                "mtp.weights",
                "a model with multi-token-prediction weights (num_nextn_predict_layers)",
                f"num_mtp_tokens {num_mtp_tokens}, {model.model_id} {no_drafts(json.loads(model.hf_config))}",
                "set num_mtp_tokens to 0",
            )
        )
    dcp = parallel.decode_context_parallel_size
    if phase is Phase.DECODE and dcp > 1:
        found += semantics.violations(model, parallel.tensor_parallel_size, dcp)
        found += _context(model, parallel, semantics.name, block_size, num_mtp_tokens, kv_transfer)
    return found


def _raising(rules: Callable[P, list[LegalityError]]) -> Callable[P, None]:
    def check(*args: P.args, **kwargs: P.kwargs) -> None:
        for error in rules(*args, **kwargs):
            raise error

    return check


#: Raises the first of :func:`violations`, if there is any; takes the same arguments.
check = _raising(violations)


def _sizes(parallel: ParallelConfig, num_devices: int | None) -> Iterator[LegalityError]:
    named = {
        "tp_size": parallel.tensor_parallel_size,
        "pp_size": parallel.pipeline_parallel_size,
        "dp_size": parallel.data_parallel_size,
        "ep_size": parallel.expert_parallel_size,
        "moe_dp_size": parallel.moe_data_parallel_size,
        "dcp_size": parallel.decode_context_parallel_size,
        "cp_kv_cache_interleave_size": parallel.cp_kv_cache_interleave_size,
    }
    for name, size in named.items():
        if size < 1:
            yield LegalityError("world.sizes", "sizes of at least 1", f"{name} {size}", f"set {name} to 1 or more")
    if num_devices is not None and parallel.world_size > num_devices:
        yield LegalityError(
            "world.devices",
            "tp_size * pp_size * dp_size at most the number of devices",
            f"tp_size {parallel.tensor_parallel_size} * pp_size {parallel.pipeline_parallel_size} * dp_size "
            f"{parallel.data_parallel_size} = {parallel.world_size}, {num_devices} devices",
            "lower one of them or give more devices",
        )


def _divisor_remedy(name: str, total: int) -> str:
    return f"choose {name} from the divisors of {total}"


def _heads(model: ModelConfig, parallel: ParallelConfig) -> Iterator[LegalityError]:
    tp, h, h_kv = parallel.tensor_parallel_size, model.num_attention_heads, model.num_key_value_heads
    if h % tp:
        yield LegalityError(
            "tp.heads",
            "num_attention_heads % tp_size = 0",
            f"{h} query heads, tp_size {tp}",
            _divisor_remedy("tp_size", h),
        )
    if model.attention is AttentionKind.GQA and h_kv % tp and tp % h_kv:
        yield LegalityError(
            "tp.kv_heads",
            "tp_size a divisor or a multiple of num_key_value_heads (KV heads are split, or copied whole)",
            f"{h_kv} KV heads, tp_size {tp}",
            f"choose tp_size from the divisors or the multiples of {h_kv}",
        )


def _dense(model: ModelConfig, parallel: ParallelConfig) -> Iterator[LegalityError]:
    tp = parallel.tensor_parallel_size
    vocab = round_up(model.vocab_size, VOCAB_PADDING)
    if vocab % tp:
        yield LegalityError(
            "tp.vocab",
            f"the vocabulary, padded to a multiple of {VOCAB_PADDING}, % tp_size = 0",
            f"{model.vocab_size} padded to {vocab}, tp_size {tp}",
            _divisor_remedy("tp_size", vocab),
        )
    widths = {
        "intermediate_size": model.intermediate_size if not all(model.moe_layers) else 0,
        "shared_expert_intermediate_size": model.shared_expert_intermediate_size,
    }
    for name, width in widths.items():
        if width % tp:
            yield LegalityError(
                "tp.intermediate", f"{name} % tp_size = 0", f"{width}, tp_size {tp}", _divisor_remedy("tp_size", width)
            )


def _experts(model: ModelConfig, parallel: ParallelConfig, free: bool) -> Iterator[LegalityError]:
    tp, dp = parallel.tensor_parallel_size, parallel.data_parallel_size
    ep, moe_dp = parallel.expert_parallel_size, parallel.moe_data_parallel_size
    ranks = tp * dp
    if not model.is_moe:
        if ep > 1 or moe_dp > 1:
            yield LegalityError(
                "ep.experts",
                "a model with experts for ep_size or moe_dp_size above 1",
                f"ep_size {ep}, moe_dp_size {moe_dp}, {model.model_id} has none",
                "set both to 1",
            )
        return
    if ranks % (ep * moe_dp):
        yield LegalityError(
            "ep.divides",
            "tp_size * dp_size % (ep_size * moe_dp_size) = 0: moe_tp * moe_dp * ep = tp * dp",
            f"tp_size {tp} * dp_size {dp} = {ranks}, ep_size {ep}, moe_dp_size {moe_dp}",
            f"set ep_size to 1 or {ranks} and moe_dp_size to 1",
        )
        return
    if not free and ep not in (1, ranks):
        yield LegalityError(
            "ep.engine",
            "ep_size of 1 or tp_size * dp_size: the engine spreads experts over all ranks of a stage or none",
            f"ep_size {ep}, tp_size {tp} * dp_size {dp} = {ranks}",
            f"set ep_size to 1 or {ranks}",
        )
    if not free and moe_dp > 1:
        yield LegalityError(
            "moe_dp.engine",
            "moe_dp_size of 1: the engine keeps one copy of the experts per instance",
            f"moe_dp_size {moe_dp}",
            "set moe_dp_size to 1",
        )
    if ep > model.num_experts:
        yield LegalityError(
            "ep.experts",
            "at least one expert per rank",
            f"ep_size {ep}, {model.num_experts} experts",
            f"lower ep_size to {model.num_experts} or less",
        )
    moe_tp = parallel.moe_tensor_parallel_size
    if model.moe_intermediate_size % moe_tp:
        yield LegalityError(
            "moe_tp.intermediate",
            "moe_intermediate_size % moe_tp = 0, moe_tp = tp_size * dp_size / (ep_size * moe_dp_size)",
            f"{model.moe_intermediate_size}, moe_tp {moe_tp}",
            f"set ep_size to {ranks} or choose tp_size * dp_size from the divisors of {model.moe_intermediate_size}",
        )


def _blocks(model: ModelConfig, parallel: ParallelConfig, block: int) -> Iterator[LegalityError]:
    """Every dimension that is split must fall on the borders of the blocks that share a scale."""
    tp, moe_tp = parallel.tensor_parallel_size, parallel.moe_tensor_parallel_size
    h, h_kv = model.num_attention_heads, model.num_key_value_heads
    splits = [("attention output", h * model.v_head_dim, tp)]
    if model.attention is AttentionKind.GQA:
        splits += [("query", h * model.head_dim, tp), ("key and value", h_kv * model.head_dim, min(tp, h_kv))]
    else:
        splits += [
            ("q_b_proj", h * model.head_dim, tp),
            ("kv_b_proj", h * (model.qk_nope_head_dim + model.v_head_dim), tp),
        ]
    if not all(model.moe_layers):
        splits.append(("intermediate_size", model.intermediate_size, tp))
    if model.is_moe:
        splits.append(("moe_intermediate_size", model.moe_intermediate_size, moe_tp))
        splits.append(("shared_expert_intermediate_size", model.shared_expert_intermediate_size, tp))
    for name, width, ways in splits:
        # A width that does not divide at all is another rule's; an unsplit one may end in a partial block.
        if ways > 1 and width % ways == 0 and (width // ways) % block:
            yield LegalityError(
                "quant.block",
                f"each shard of a block-quantised weight a multiple of its {block} x {block} blocks",
                f"{name} {width} / {ways} = {width // ways}",
                "split it fewer ways (tp_size, or ep_size = tp_size * dp_size for experts) or choose another "
                "quantisation",
            )


def _context(
    model: ModelConfig, parallel: ParallelConfig, semantics: str, block_size: int, num_mtp_tokens: int, transfer: bool
) -> Iterator[LegalityError]:
    dcp, interleave = parallel.decode_context_parallel_size, parallel.cp_kv_cache_interleave_size
    if any(window is not None for window in model.layer_windows):
        yield LegalityError(
            "dcp.sliding_window",
            "full attention in every layer",
            f"dcp_size {dcp}, {sum(w is not None for w in model.layer_windows)} layers of {model.model_id} have a "
            "sliding window",
            "set dcp_size to 1",
        )
    if block_size % interleave:
        yield LegalityError(
            "dcp.interleave",
            "block_size % cp_kv_cache_interleave_size = 0",
            f"block_size {block_size}, cp_kv_cache_interleave_size {interleave}",
            _divisor_remedy("cp_kv_cache_interleave_size", block_size),
        )
    if transfer and interleave != block_size:
        yield LegalityError(
            "dcp.interleave_transfer",
            "cp_kv_cache_interleave_size = block_size where the KV cache moves between instances",
            f"block_size {block_size}, cp_kv_cache_interleave_size {interleave}",
            f"set cp_kv_cache_interleave_size to {block_size}",
        )
    if semantics == "vllm" and num_mtp_tokens and interleave > 1 and model.attention is not AttentionKind.DSA:
        yield LegalityError(
            "dcp.interleave_mtp",
            "cp_kv_cache_interleave_size of 1 with speculative decoding (no dense kernel of vLLM masks other orders)",
            f"cp_kv_cache_interleave_size {interleave}, num_mtp_tokens {num_mtp_tokens}",
            # Where the cache moves between instances, an interleave of 1 would break the rule above.
            "set dcp_size to 1 or num_mtp_tokens to 0"
            if transfer
            else "set cp_kv_cache_interleave_size to 1 or num_mtp_tokens to 0",
        )
