"""What a source says of the cache of Llama-3.1-70B on sixteen H100: more stages make room, more TP does not."""

import pytest

from tensor_cast.core.capacity import CapacityPlanner
from tensor_cast.core.capacity_config import CapacityConfig
from tensor_cast.units import GIB

MODEL, LENGTH = "meta-llama/Meta-Llama-3.1-70B", 32_768


def planner(tp: int, pp: int, gib: float | None = None) -> CapacityPlanner:
    given = None if gib is None else (gib,)
    return CapacityPlanner(
        CapacityConfig(
            model=MODEL, device="H100_SXM", tp_size=tp, pp_size=pp, max_model_len=LENGTH, kv_memory_gib=given
        )
    )


@pytest.mark.parametrize(
    ("tp", "pp", "gib", "token_bytes", "requests"),
    [
        # 2 (K, V) * 1 head * 128 * 2 B * 80 layers: the eight heads are on sixteen ranks
        (16, 1, 54.0, 40_960, 43),
        # the same over 40 layers
        (8, 2, 54.4, 20_480, 87),
    ],
)
def test_requests_that_the_given_memory_holds(tp: int, pp: int, gib: float, token_bytes: int, requests: int) -> None:
    assert int(gib * GIB / (token_bytes * LENGTH)) == requests
    found = planner(tp, pp, gib)
    plan = found.plan()
    assert set(plan.bytes_per_token) == {token_bytes}
    assert found.resident(plan, LENGTH) == requests


def test_estimated_memory_holds_a_few_more() -> None:
    wide, staged, half = (planner(*sizes) for sizes in ((16, 1), (8, 2), (8, 1)))
    plans = [p.plan() for p in (wide, staged, half)]
    assert wide.resident(plans[0], LENGTH) == 47
    assert staged.resident(plans[1], LENGTH) == 95
    assert plans[1].capacity.kv_tokens / plans[2].capacity.kv_tokens == pytest.approx(2.32, abs=0.005)
