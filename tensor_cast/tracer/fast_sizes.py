"""Size arithmetic that is done once: torch's symbolic sizes with a memory.

Working out strides and contiguity of one symbolic tensor takes dozens of small steps (multiply two sizes, compare two
sizes), each some 40 microseconds of sympy and bookkeeping, and nearly all of them repeat. A :class:`MemoNode` is
torch's own node that keeps the results it was asked for before; it computes nothing differently. The first answer
stands because symbols are never tied to values here (:meth:`tensor_cast.tracer.sizes.SizeSpace.check`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx.experimental.sym_node import SymNode

_BINARY = """add sub mul mod and_ or_ sym_and sym_or int_floordiv floordiv eq ne gt lt le ge sym_min sym_max
    float_truediv int_truediv truediv pow float_pow pow_by_natural"""
_UNARY = "neg abs floor ceil sym_not sym_float sym_int pos"
_ON_LISTS = """is_contiguous is_channels_last_contiguous_2d is_channels_last_contiguous_3d is_channels_last_strides_2d
    is_channels_last_strides_3d is_non_overlapping_and_dense_indicator is_non_overlapping_and_dense"""
_QUESTIONS = "guard_int guard_bool guard_size_oblivious guard_or_false guard_or_true statically_known_true expect_true"
_FACTS = "maybe_as_int maybe_as_bool is_nested_int"


class MemoNode(SymNode):
    """A symbolic size that remembers what was done with it. Made by :func:`remembering`."""

    _memory: dict[Any, Any]
    _known: dict[Any, MemoNode]

    def wrap_int(self, num: int) -> SymNode:
        """The constant ``num``, one node for each."""
        found = self._known.get(num)
        if found is None:
            found = self._known[num] = remembering(SymNode.wrap_int(self, num), self._known)
        return found


def remembering(node: SymNode, known: dict[Any, MemoNode]) -> MemoNode:
    """``node`` as a :class:`MemoNode`; equal expressions of one size space (``known``) become one node."""
    if type(node) is MemoNode:
        return node
    key = (node.pytype, node._expr)
    found = known.get(key)
    if found is None:
        node.__class__ = MemoNode
        found = known[key] = node  # type: ignore[assignment]
        found._memory = {}
        found._known = known
    return found


def _remember_operation(name: str, plain: Callable[..., SymNode]) -> Callable[..., SymNode]:
    def operation(self: MemoNode, *others: SymNode) -> SymNode:
        key = (name, *others)
        found = self._memory.get(key)
        if found is None:
            same = tuple(remembering(other, self._known) for other in others)
            found = self._memory[key] = remembering(plain(self, *same), self._known)
        return found

    return operation


def _remember_on_lists(name: str, plain: Callable[..., SymNode]) -> Callable[..., SymNode]:
    def operation(self: MemoNode, sizes: list[SymNode], strides: list[SymNode]) -> SymNode:
        key = (name, *sizes, None, *strides)
        found = self._memory.get(key)
        if found is None:
            found = self._memory[key] = remembering(plain(self, sizes, strides), self._known)
        return found

    return operation


def _remember_answer(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    def question(self: MemoNode, *where: Any) -> Any:
        try:
            return self._memory[name]
        except KeyError:
            answer = self._memory[name] = plain(self, *where)
            return answer

    return question


for _names, _wrap in (
    (_BINARY, _remember_operation),
    (_UNARY, _remember_operation),
    (_ON_LISTS, _remember_on_lists),
    (_QUESTIONS, _remember_answer),
    (_FACTS, _remember_answer),
):
    for _name in _names.split():
        if hasattr(SymNode, _name):
            setattr(MemoNode, _name, _wrap(_name, getattr(SymNode, _name)))
