"""Which layers each pipeline stage runs: the engine's default, the user's split, the best split, and what DSA forbids.

A partition is the number of decoder layers of each stage, first stage first; embedding, head and draft (MTP) layers are
not counted. Sources: vLLM 0.28 to 0.33 ``distributed/utils.py`` (default rule, checks of ``VLLM_PP_LAYER_PARTITION``)
and ``models/deepseek_v2.py`` (which layers own an indexer).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from itertools import accumulate, combinations, pairwise
from math import comb, inf

from tensor_cast.errors import ConfigError, LegalityError

__all__ = [
    "AUTO",
    "MAX_LISTED",
    "DsaSplit",
    "Partition",
    "all_partitions",
    "best_partition",
    "check_partition",
    "default_partition",
    "layer_equivalents",
    "max_concurrent_batches",
    "nearest_safe_partitions",
    "parse_dsa_split",
    "parse_partition",
    "refuse_unsafe",
    "spell",
    "stage_ranges",
    "unsafe_by_stage",
    "unsafe_layers",
]

Partition = tuple[int, ...]

#: What stands for the best partition where one is asked for.
AUTO = "auto"

#: Splits that ``all`` lists at most.
MAX_LISTED = 5000


class DsaSplit(StrEnum):
    """What to do about layers that would reuse top-k indices never written on their stage.

    ``SELF_COMPUTE``: they get an indexer of their own (weights, cache, FLOPs). ``SEND_INDICES``: the stage before sends
    the indices along with the hidden states. ``UNSAFE``: nothing; outputs are wrong in those layers.
    """

    SELF_COMPUTE = "self-compute"
    SEND_INDICES = "send-indices"
    UNSAFE = "unsafe"


def parse_dsa_split(text: str) -> DsaSplit:
    """The way that ``text`` names. Raises :class:`ConfigError` for any other."""
    try:
        return DsaSplit(text)
    except ValueError:
        raise ConfigError(f"--dsa-split must be {', '.join(DsaSplit)}; found {text!r}") from None


def layer_equivalents(partition: Sequence[int], num_mtp_tokens: int) -> tuple[int, ...]:
    """Layers that each stage runs in a step: its own, and the last one the draft layer once for each draft token."""
    *others, last = partition
    return (*others, last + num_mtp_tokens)


def default_partition(layers: int, stages: int) -> Partition:
    """The rule of vLLM: equal shares; left-over layers go to the second-to-last stage, then to those before it.

    With fewer layers than stages some get none, which :func:`check_partition` refuses.
    """
    share, rest = divmod(layers, stages)
    return tuple(share + (stages - 1 - rest <= stage < stages - 1) for stage in range(stages))


def parse_partition(text: str, layers: int, stages: int) -> Partition:
    """The partition that ``text`` spells, e.g. ``"41,37"``.

    Raises:
        ConfigError: a field is no integer.
        LegalityError: as :func:`check_partition`.
    """
    fields = [field.strip() for field in text.split(",")]
    if not all(re.fullmatch("-?[0-9]{1,9}", field) for field in fields):
        raise ConfigError(
            f"pipeline partition {text!r}: need integers separated by commas, one for each stage, such as "
            f"{spell(default_partition(layers, stages))}"
        )
    partition = tuple(map(int, fields))
    check_partition(partition, layers, stages)
    return partition


def check_partition(partition: Sequence[int], layers: int, stages: int) -> None:
    """Refuse a partition that does not fit.

    The engine itself checks count and sum alone, and would start with an empty or a negative stage.

    Raises:
        LegalityError: wrong number of stages (``pp.partition_count``), a stage without layers
            (``pp.partition_positive``), or a sum that is not the number of layers (``pp.partition_sum``).
    """
    remedy = "the engine's own split is " + spell(default_partition(layers, stages))
    if len(partition) != stages:
        raise LegalityError(
            "pp.partition_count",
            "a number of layers for each of the pp_size stages",
            f"{len(partition)} in {spell(partition)}, pp_size {stages}",
            remedy,
        )
    if min(partition) < 1:
        raise LegalityError("pp.partition_positive", "at least one layer in each stage", spell(partition), remedy)
    if sum(partition) != layers:
        raise LegalityError(
            "pp.partition_sum",
            f"stages that add up to the model's {layers} layers",
            f"{'+'.join(map(str, partition))} = {sum(partition)}",
            remedy,
        )


def spell(partition: Sequence[int]) -> str:
    """A partition, or a list of layers, as options and tables have it: ``41,37``."""
    return ",".join(map(str, partition))


def stage_ranges(partition: Sequence[int]) -> tuple[range, ...]:
    """Layers of each stage."""
    ends = list(accumulate(partition))
    return tuple(range(end - count, end) for end, count in zip(ends, partition, strict=True))


def all_partitions(layers: int, stages: int) -> Iterator[Partition]:
    """Every split with at least one layer in each stage, in rising order of the first stage.

    Raises:
        ConfigError: there are more than :data:`MAX_LISTED`.
    """
    count = comb(layers - 1, stages - 1)
    if count > MAX_LISTED:
        raise ConfigError(
            f"{layers} layers split over {stages} stages in {count:,} ways, more than the {MAX_LISTED:,} that can be "
            "listed; ask for the best one (auto) instead"
        )
    for cuts in combinations(range(1, layers), stages - 1):
        bounds = (0, *cuts, layers)
        yield tuple(b - a for a, b in pairwise(bounds))


def best_partition(
    layers: int, stages: int, cost: Callable[[int, int, int], float]
) -> tuple[Partition, float] | tuple[None, float]:
    """The split whose worst stage costs least, exactly; of several, one that costs least in sum.

    Args:
        layers: how many there are.
        stages: how many there are.
        cost: ``cost(stage, start, end)`` of a stage that runs layers ``start <= i < end``; any real number (negated
            KV blocks, seconds), ``inf`` where it is impossible. Called at most once for each combination.

    Returns:
        ``(partition, cost of its worst stage)``; ``(None, inf)`` where no split is possible.
    """
    # worst[end]: least possible worst cost of the stages so far when they end there.
    worst: dict[int, float] = {0: -inf}
    known: list[list[tuple[int, int, float]]] = []
    for stage in range(stages):
        last = stage == stages - 1
        known.append([])
        reached: dict[int, float] = {}
        for start, before in worst.items():
            for end in (layers,) if last else range(start + 1, layers - (stages - 2 - stage)):
                value = cost(stage, start, end)
                known[stage].append((start, end, value))
                reached[end] = min(reached.get(end, inf), max(before, value))
        worst = reached
    limit = worst.get(layers, inf)
    if limit == inf:
        return None, inf
    # Among the splits that reach it, the least sum.
    sums: dict[int, tuple[float, Partition]] = {0: (0.0, ())}
    for stage in range(stages):
        found: dict[int, tuple[float, Partition]] = {}
        for start, end, value in known[stage]:
            if start in sums and value <= limit:
                total, sizes = sums[start]
                candidate = (total + value, (*sizes, end - start))
                if end not in found or candidate < found[end]:
                    found[end] = candidate
        sums = found
    return sums[layers][1], limit


# -- sparse attention whose layers share top-k indices ---------------------------------------------------------------


def unsafe_by_stage(partition: Sequence[int], indexer_full: Sequence[bool]) -> tuple[tuple[int, ...], ...]:
    """For each stage, the layers that would read top-k indices which no layer of the stage has written.

    Args:
        partition: layers of each stage.
        indexer_full: for each layer, whether it computes indices itself; empty for a model that shares none.
    """
    out = []
    for layers in stage_ranges(partition):
        writes = next((i for i in layers if not indexer_full or indexer_full[i]), layers.stop)
        out.append(tuple(range(layers.start, writes)))
    return tuple(out)


def unsafe_layers(partition: Sequence[int], indexer_full: Sequence[bool]) -> tuple[int, ...]:
    """All layers of :func:`unsafe_by_stage` in order; empty for a safe partition."""
    return tuple(i for stage in unsafe_by_stage(partition, indexer_full) for i in stage)


def nearest_safe_partitions(
    partition: Sequence[int], indexer_full: Sequence[bool], count: int = 3
) -> tuple[Partition, ...]:
    """Safe partitions closest to ``partition``: least sum of moved stage borders first.

    Of those as close, first the ones with more layers on earlier stages: the last one has head and drafts as well.
    Empty where there is none (fewer layers that compute indices than stages).
    """
    layers, stages = len(indexer_full), len(partition)
    starts = [stage.start for stage in stage_ranges(partition)]
    safe = [i for i in range(layers) if indexer_full[i]]
    if not safe or safe[0] != 0:
        return ()
    # beams[last start] -> the few cheapest (moved, starts so far, negated so that later ones sort first)
    beams: dict[int, list[tuple[int, tuple[int, ...]]]] = {0: [(0, (0,))]}
    for stage in range(1, stages):
        following: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        for start in safe:
            options = [
                (moved + abs(start - starts[stage]), (*chosen, -start))
                for before, kept in beams.items()
                if before < start
                for moved, chosen in kept
            ]
            if options:
                following[start] = sorted(options)[:count]
        beams = following
    ranked = sorted(option for kept in beams.values() for option in kept)[:count]
    out = []
    for _, chosen in ranked:
        bounds = (*(-start for start in chosen), layers)
        out.append(tuple(b - a for a, b in pairwise(bounds)))
    return tuple(out)


def refuse_unsafe(partition: Sequence[int], indexer_full: Sequence[bool], split: DsaSplit | None) -> None:
    """Refuse a partition with unsafe layers unless ``split`` says how to go on.

    Raises:
        LegalityError: ``pp.dsa_indices``, with the layers, the nearest safe partitions and the ways out.
    """
    unsafe = unsafe_layers(partition, indexer_full)
    if not unsafe or split is not None:
        return
    safe = nearest_safe_partitions(partition, indexer_full)
    layers = f"layer{'s' * (len(unsafe) > 1)} {', '.join(map(str, unsafe))}"
    options = (
        f"choose a safe partition (nearest first: {' or '.join(map(spell, safe))}; msmodeling capacity "
        "--pp-layer-partition auto finds the one with most KV blocks), or"
        if safe
        else "choose"
    )
    raise LegalityError(
        "pp.dsa_indices",
        "stages that start with a layer that computes its own top-k indices: the engine passes hidden states between "
        "stages, not indices",
        f"partition {spell(partition)}, where {layers} would read indices never written on their stage",
        f"{options} --dsa-split self-compute (those layers get an indexer), send-indices (the indices travel along) "
        "or unsafe (wrong outputs, priced as is)",
    )


def max_concurrent_batches(stages: int, *, async_scheduling: bool = True, v2_runner: bool = True) -> int:
    """Batches that vLLM keeps in flight: one for each stage, one more where scheduling overlaps with execution.

    With asynchronous scheduling the second model runner takes ``stages + 1``; the first 2 without pipeline parallelism.
    Source: vLLM 0.30 ``config/vllm.py``, ``max_concurrent_batches``.
    """
    if not async_scheduling:
        return stages
    if v2_runner:
        return stages + 1
    return 2 if stages == 1 else stages
