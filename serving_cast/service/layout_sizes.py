"""Which layouts a search looks at (what the user listed, else what may be any good), and what rules they break."""

from __future__ import annotations

from collections.abc import Iterator

from serving_cast.config import Mode, ParallelConfig
from serving_cast.service.utils import divisors, resolve_search_sizes
from serving_cast.setting import Setting
from tensor_cast.errors import LegalityError
from tensor_cast.ir.record import Phase
from tensor_cast.parallel import violations

__all__ = ["broken_rules", "layout_sizes"]


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


def broken_rules(setting: Setting, parallel: ParallelConfig, phase: Phase) -> list[LegalityError]:
    """Every rule that a layout breaks in a phase of the search; empty if it is legal."""
    return violations(
        setting.model,
        parallel.to_tensor_cast(),
        dcp_semantics=setting.dcp_semantics,
        block_size=setting.block_size,
        quant_block=setting.quant.block,
        num_mtp_tokens=setting.workload.num_mtp_tokens,
        phase=phase,
        num_devices=setting.config.num_devices,
        free_experts=setting.engine.moe_data_parallel,
        kv_transfer=setting.config.mode is not Mode.AGGREGATED,
    )


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
