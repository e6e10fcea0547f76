"""Symbolic sizes: making B, Q and S for fake tensors, and reading torch's expressions back as ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from tensor_cast.ir import expr as ours
from tensor_cast.ir.expr import Dim, Expr
from tensor_cast.tracer.fast_sizes import MemoNode, remembering

#: Values that stand behind the symbols where torch must decide something: distinct, no size of any model, and with
#: S > Q > 1 as in every real step. No decision that fixes a symbol is accepted, see :meth:`SizeSpace.check`.
HINTS = {"B": 11, "Q": 7, "S": 1048583}


@dataclass(frozen=True)
class Sizes:
    """Batch, query length and context of a step: torch's symbols, or plain integers for a concrete trace."""

    B: Any
    Q: Any
    S: Any


class SizeSpace:
    """A fake-tensor mode together with the symbols that live in it.

    Args:
        concrete: sizes by symbol name for a concrete trace; None for a symbolic one.
    """

    def __init__(self, concrete: Mapping[str, int] | None = None) -> None:
        self._env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self._env)
        if concrete is None:
            self.mode.cache_enabled = False
        self._symbols: dict[sympy.Symbol, str] = {}
        self._known: dict[sympy.Expr, Dim] = {}
        self._nodes: dict[Any, MemoNode] = {}
        values = {name: self._symbol(name) if concrete is None else concrete[name] for name in HINTS}
        self.sizes = Sizes(**values)

    def _symbol(self, name: str) -> torch.SymInt:
        source = ConstantSource(name)
        made = self._env.create_symbol(HINTS[name], source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        self._symbols[made] = name
        size = self._env.create_symintnode(made, hint=HINTS[name], source=source)
        return torch.SymInt(remembering(size.node, self._nodes))

    def check(self) -> None:
        """Raise :class:`RuntimeError` if tracing tied a symbol to a value or to another symbol."""
        for symbol, name in self._symbols.items():
            if symbol in self._env.replacements:
                raise RuntimeError(f"tracing fixed {name} to {self._env.replacements[symbol]}, which is wrong")

    def dim(self, size: int | torch.SymInt) -> Dim:
        """A torch size as a plain int or one of our expressions."""
        if type(size) is int:
            return size
        node = size.node.expr
        found = self._known.get(node)
        if found is None:
            found = self._known[node] = Expr.wrap(self._convert(node)).simplified()
        return found

    def _convert(self, node: sympy.Expr) -> Dim:
        if node.is_Integer:
            return int(node)
        if node.is_Symbol:
            return ours.symbol(self._symbols[node])
        args = [Expr.wrap(self._convert(arg)) for arg in node.args]
        match type(node).__name__:
            case "Add":
                return sum(args[1:], args[0])
            case "Mul":
                out = args[0]
                for arg in args[1:]:
                    out = out * arg
                return out
            case "Pow":
                out = Expr.wrap(1)
                for _ in range(int(node.args[1])):
                    out = out * args[0]
                return out
            case "FloorDiv" | "CleanDiv":
                return ours.floordiv(args[0], args[1])
            case "CeilDiv":
                return ours.ceildiv(args[0], args[1])
            case "Mod" | "PythonMod":
                return ours.mod(args[0], args[1])
            case "Min":
                return ours.minimum(*args)
            case "Max":
                return ours.maximum(*args)
        raise RuntimeError(f"no size expression for {type(node).__name__} in {node}")
