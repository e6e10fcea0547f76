"""Which layouts a search looks at: the sizes that the user listed, and for the other axes what may be any good."""

from __future__ import annotations

from collections.abc import Iterator

from serving_cast.service.utils import divisors, resolve_search_sizes
from serving_cast.setting import Setting

__all__ = ["layout_sizes"]


def layout_sizes(setting: Setting) -> Iterator[dict[str, int]]:
    """Sizes of every layout to look at, legal or not. Only sizes that the user listed may need too many devices."""
    space, total = setting.config.space, setting.config.num_devices
    experts = setting.model.is_moe
    listed = space.tp is not None and space.dp is not None
    for tp in resolve_search_sizes(space.tp, _tp_sizes(setting)):
        for dp in resolve_search_sizes(space.dp, _dp_sizes(setting, tp)):
            if tp * dp > total and not (listed or max(tp, dp) > total):
                continue
            for pp in resolve_search_sizes(space.pp, (1,)):
                if pp > 1 and tp * dp * pp > total and not (listed or pp > total):
                    continue
                for ep in resolve_search_sizes(space.ep, (1, tp * dp) if experts else (1,)):
                    for moe_dp in resolve_search_sizes(space.moe_dp, (1,)):
                        for dcp in resolve_search_sizes(space.dcp, divisors(tp)):
                            yield {
                                "tp_size": tp,
                                "pp_size": pp,
                                "dp_size": dp,
                                "ep_size": ep,
                                "moe_dp_size": moe_dp,
                                "dcp_size": dcp,
                            }


def _tp_sizes(setting: Setting) -> tuple[int, ...]:
    """TP sizes to try unasked: what divides the heads and fits the devices. The rest could only be refused."""
    return tuple(n for n in divisors(setting.model.num_attention_heads) if n <= setting.config.num_devices)


def _dp_sizes(setting: Setting, tp: int) -> tuple[int, ...]:
    """DP sizes to try unasked beside ``tp``: those that divide the devices, or an instance's where it is given.

    Ranks that share no experts are replicas by another name, so a dense model gets more than one only to fill an
    instance of a given size.
    """
    config = setting.config
    asked = {config.prefill_devices_per_instance, config.decode_devices_per_instance} - {None}
    instances = {size // tp for size in asked if size is not None and size % tp == 0}
    alone = divisors(config.num_devices) if setting.model.is_moe else (1,)
    return tuple(sorted({*alone, *(d for n in instances for d in divisors(n))}))
