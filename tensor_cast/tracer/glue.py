"""Making parts of what lies between the regions: a recording with markers, cut into pieces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tensor_cast.ir.program import Slot
from tensor_cast.ir.record import Kind, OpRecord, Part
from tensor_cast.tracer.recorder import Marker


def glue_slots(
    events: list[OpRecord | Marker], groups: Mapping[int, tuple[int, ...]]
) -> tuple[list[Slot], dict[str, Part]]:
    """Slots in program order and the parts of glue between regions; glue never spans the border of a layer.

    Args:
        events: recorded ops with the markers ``begin``/``end`` of layers and ``region`` of regions.
        groups: representative layer -> layers like it.
    """
    slots: list[Slot] = []
    parts: dict[str, Part] = {}
    layer: int | None = None
    piece: list[OpRecord] = []
    count = 0

    def flush(position: int) -> None:
        nonlocal piece, count
        name = f"outer.{len(slots)}" if layer is None else f"layer.{layer}.{count}"
        if piece:
            key = f"glue/{name}"
            parts[key] = glue_part(key, piece, events[position:])
            slots.append(Slot("glue", name, () if layer is None else groups[layer]))
            count += 1
        piece = []

    for position, event in enumerate(events):
        if isinstance(event, OpRecord):
            piece.append(event)
            continue
        flush(position)
        match event.what:
            case ("begin", int(index)):
                layer, count = index, 0
            case ("end", _):
                layer = None
            case ("region", role, name):
                slots.append(Slot(role, name, () if layer is None else groups[layer]))
    flush(len(events))
    return slots, parts


def outside_ids(ops: Iterable[OpRecord]) -> list[int]:
    """Values that the ops read but did not make, weights and caches left out."""
    made: set[int] = set()
    found: dict[int, None] = {}
    for op in ops:
        for spec, value in zip(op.inputs, op.input_ids, strict=True):
            if value not in made and spec.kind in (Kind.ACTIVATION, Kind.INDEX):
                found[value] = None
        made.update(op.output_ids)
    return list(found)


def glue_part(key: str, piece: list[OpRecord], later: Iterable[OpRecord | Marker]) -> Part:
    """A part of glue ops; its outputs are the values that something later reads."""
    read = {i for event in later for i in event.input_ids}
    made = dict.fromkeys(i for op in piece for i in op.output_ids)
    return Part(
        key=key,
        ops=tuple(piece),
        input_ids=tuple(outside_ids(piece)),
        output_ids=tuple(i for i in made if i in read),
    )


def split_at_head(events: list[OpRecord | Marker]) -> tuple[list[OpRecord | Marker], list[OpRecord]]:
    """Events up to and with the head, and the ops after it."""
    at = next(i for i, e in enumerate(events) if isinstance(e, Marker) and e.what[:2] == ("region", "head"))
    return events[: at + 1], [e for e in events[at + 1 :] if isinstance(e, OpRecord)]
