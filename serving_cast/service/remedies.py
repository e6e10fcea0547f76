"""What to change where a layout does not fit memory: only what is legal for the model and helps this layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from serving_cast.config import ParallelConfig
from serving_cast.service.layout_sizes import broken_rules
from serving_cast.service.utils import divisors
from serving_cast.setting import Setting
from tensor_cast.dtypes import bits_of
from tensor_cast.ir.record import Phase
from tensor_cast.model_config import AttentionKind

__all__ = ["Advice", "advise"]


@dataclass(frozen=True)
class Advice:
    """What to change, by what is too large.

    Args:
        weights, activation, kv: beginnings of a remedy for each kind of memory.
        longest: remedy where it is the one longest request that finds no room.
        longest_tokens: tokens of that request.
    """

    weights: str = "use more devices per instance, or a smaller weight format"
    activation: str = "lower --max-batched-tokens, or use more devices per instance"
    kv: str = "use more devices per instance, or a smaller KV format"
    longest: str = "lower --max-model-len, or use more devices per instance"
    longest_tokens: int = 0


def advise(setting: Setting, parallel: ParallelConfig, phase: str) -> Advice:
    """Remedies for one layout in one serving phase.

    More expert parallelism is never one: ``ep`` only says how the experts are cut over the same tp * dp ranks.
    """
    tp, dp = _more_tp(setting, parallel), _more_dp(setting, parallel)
    pp, dcp = _more_pp(setting, parallel), _more_dcp(setting, parallel) if phase != "prefill" else ""
    copies = "fewer copies of the experts (--moe-dp-sizes)" if parallel.moe_dp_size > 1 else ""
    # Latents and the keys of indexers are the same on every TP rank, KV heads are copied once there is one for each.
    kv_tp = tp if _splits_kv(setting, parallel.tp_size) else ""
    scheme = setting.quant.experts if setting.model.is_moe else setting.quant.linear
    weight_bits = bits_of(scheme.weight_dtype or setting.quant.model_dtype)
    weight_format = "a smaller weight format (--quantize-linear-action)" if weight_bits > 4 else ""
    kv_format = "a smaller KV format (--quantize-attention-action)" if bits_of(setting.quant.kv_dtype) > 8 else ""
    cache = _ways(kv_tp, dcp, pp)
    batch = "lower --batch-range" if setting.config.space.batch_range and phase != "prefill" else ""
    return Advice(
        weights=_join(_ways(tp, dp, pp, copies), weight_format),
        activation=_join("lower --max-batched-tokens", _ways(tp, dp, pp, copies)),
        kv=_join(batch, cache, kv_format),
        longest=_join("lower --max-model-len", cache, kv_format),
        longest_tokens=setting.start_up.max_model_len,
    )


def _ways(*found: str) -> str:
    """``use more tp, dp or ...``; more devices where no layout of those that there are helps."""
    ways = [way for way in found if way]
    if not ways:
        return "use more devices (--num-devices)"
    head, last = ways[:-1], ways[-1]
    return f"use {', '.join(head)} or {last}" if head else f"use {last}"


def _join(*parts: str) -> str:
    return ", or ".join(part for part in parts if part)


def _legal(setting: Setting, parallel: ParallelConfig) -> bool:
    return not broken_rules(setting, parallel, Phase.DECODE)


def _wider(parallel: ParallelConfig, tp: int, dp: int) -> ParallelConfig:
    """The layout with other sizes of TP and DP, its experts split over all of their ranks if they are now."""
    ep = tp * dp if parallel.ep_size > 1 else 1
    return replace(parallel, world_size=0, tp_size=tp, dp_size=dp, ep_size=ep, moe_dp_size=1)


def _any_legal(setting: Setting, layouts: Iterator[ParallelConfig]) -> bool:
    return any(_legal(setting, layout) for layout in layouts)


def _more_tp(setting: Setting, parallel: ParallelConfig) -> str:
    sizes = (n for n in divisors(setting.model.num_attention_heads) if n > parallel.tp_size)
    wider = (_wider(parallel, n, parallel.dp_size) for n in sizes)
    return "more tp" if _any_legal(setting, wider) else ""


def _more_dp(setting: Setting, parallel: ParallelConfig) -> str:
    """DP copies the rest of the model, but splits experts over its ranks too."""
    if not setting.model.is_moe:
        return ""
    sizes = (n for n in divisors(setting.config.num_devices) if n > parallel.dp_size)
    wider = (_wider(parallel, parallel.tp_size, n) for n in sizes)
    return "more dp" if _any_legal(setting, wider) else ""


def _more_pp(setting: Setting, parallel: ParallelConfig) -> str:
    room = setting.config.num_devices // (parallel.tp_size * parallel.dp_size)
    sizes = range(parallel.pp_size + 1, min(room, setting.model.num_hidden_layers) + 1)
    if not sizes:
        return ""
    return "stages (--pp-sizes 2)" if max(setting.config.space.pp) == 1 else "more pp"


def _more_dcp(setting: Setting, parallel: ParallelConfig) -> str:
    sizes = (n for n in divisors(parallel.tp_size) if n > parallel.dcp_size)
    return "more dcp" if _any_legal(setting, (replace(parallel, dcp_size=n) for n in sizes)) else ""


def _splits_kv(setting: Setting, tp: int) -> bool:
    """Whether more TP ranks than ``tp`` hold less KV each."""
    return setting.model.attention is AttentionKind.GQA and tp < setting.model.num_key_value_heads
