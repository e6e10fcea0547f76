"""Size expressions: integer polynomials in the symbols of a trace, with floor and ceiling division, min and max.

A trace stores each tensor dimension either as an ``int`` or as an :class:`Expr`. An expression is kept in a canonical
form (a sum of products), so that two traces can be compared with ``==`` however torch happened to order the factors.
It evaluates on ints (exactly), floats and numpy arrays, and knows neither torch nor sympy.

Symbols of every trace: ``B`` requests in the batch of one rank, ``Q`` query tokens of each request in this step,
``S`` tokens of each request in the KV cache as attention reads it, this step's ``Q`` tokens included.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

Dim: TypeAlias = "int | Expr"
#: What an expression evaluates to: an int, a float or an array of them.
Num = Any

# An atom is a symbol name or a call (function, arguments); a monomial is a sorted tuple of (atom, power).
_Atom: TypeAlias = "str | tuple[str, tuple[Expr, ...]]"
_Monomial: TypeAlias = tuple[tuple[_Atom, int], ...]


def _exact_floor_div(a: Num, b: Num) -> Num:
    return a // b


def _exact_ceil_div(a: Num, b: Num) -> Num:
    return -(-a // b)


def _true_div(a: Num, b: Num) -> Num:
    return a / b


_EXACT: dict[str, Callable[..., Num]] = {
    "floordiv": _exact_floor_div,
    "ceildiv": _exact_ceil_div,
    "mod": lambda a, b: a % b,
    "min": lambda *args: _fold(np.minimum, min, args),
    "max": lambda *args: _fold(np.maximum, max, args),
}
# The smooth reading replaces a rounded quotient by the quotient itself: the mean over requests of many lengths.
_SMOOTH: dict[str, Callable[..., Num]] = {**_EXACT, "floordiv": _true_div, "ceildiv": _true_div}


def _fold(array_op: Callable[..., Num], scalar_op: Callable[..., Num], args: tuple[Num, ...]) -> Num:
    if all(isinstance(a, int | float) for a in args):
        return scalar_op(*args)
    out = args[0]
    for arg in args[1:]:
        out = array_op(out, arg)
    return out


def _atom_key(atom: _Atom) -> str:
    return atom if isinstance(atom, str) else f"{atom[0]}({', '.join(map(str, atom[1]))})"


class Expr:
    """An immutable size expression. Build with :func:`symbol`, ``+ - *``, ``//``, :func:`ceildiv`, :func:`minimum`."""

    __slots__ = ("_hash", "_text", "terms")

    def __init__(self, terms: Mapping[_Monomial, int]) -> None:
        kept = {m: c for m, c in terms.items() if c != 0}
        self.terms: dict[_Monomial, int] = kept
        self._text: str | None = None
        self._hash = hash(frozenset(kept.items()))

    # -- construction -------------------------------------------------------------------------------------------
    @staticmethod
    def wrap(value: Dim) -> Expr:
        """``value`` as an :class:`Expr`; an int becomes a constant."""
        if isinstance(value, Expr):
            return value
        return Expr({(): int(value)})

    def simplified(self) -> Dim:
        """An int when the expression is constant, else the expression itself."""
        if not self.terms:
            return 0
        if len(self.terms) == 1 and () in self.terms:
            return self.terms[()]
        return self

    def __add__(self, other: Dim) -> Expr:
        out = dict(self.terms)
        for mono, coef in Expr.wrap(other).terms.items():
            out[mono] = out.get(mono, 0) + coef
        return Expr(out)

    __radd__ = __add__

    def __neg__(self) -> Expr:
        return Expr({m: -c for m, c in self.terms.items()})

    def __sub__(self, other: Dim) -> Expr:
        return self + (-Expr.wrap(other))

    def __rsub__(self, other: Dim) -> Expr:
        return Expr.wrap(other) - self

    def __mul__(self, other: Dim) -> Expr:
        out: dict[_Monomial, int] = {}
        for m1, c1 in self.terms.items():
            for m2, c2 in Expr.wrap(other).terms.items():
                powers: dict[_Atom, int] = dict(m1)
                for atom, power in m2:
                    powers[atom] = powers.get(atom, 0) + power
                mono = tuple(sorted(powers.items(), key=lambda item: _atom_key(item[0])))
                out[mono] = out.get(mono, 0) + c1 * c2
        return Expr(out)

    __rmul__ = __mul__

    def __floordiv__(self, other: Dim) -> Expr:
        return floordiv(self, other)

    # -- comparison and display ---------------------------------------------------------------------------------
    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):
            other = Expr.wrap(other)
        return isinstance(other, Expr) and self.terms == other.terms

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        if self._text is None:
            self._text = self._format()
        return self._text

    __repr__ = __str__

    def _format(self) -> str:
        if not self.terms:
            return "0"
        parts: list[str] = []
        ordered = sorted(self.terms.items(), key=lambda t: (-sum(p for _, p in t[0]), [_atom_key(a) for a, _ in t[0]]))
        for mono, coef in ordered:
            factors = [_atom_key(a) if p == 1 else f"{_atom_key(a)}**{p}" for a, p in mono]
            if abs(coef) != 1 or not factors:
                factors.insert(0, str(abs(coef)))
            sign = "-" if coef < 0 else "+"
            parts.append(f"{sign} {'*'.join(factors)}")
        text = " ".join(parts)
        return text[2:] if text.startswith("+ ") else "-" + text[2:]

    def symbols(self) -> frozenset[str]:
        """Names of the symbols the expression depends on."""
        out: set[str] = set()
        for mono in self.terms:
            for atom, _ in mono:
                if isinstance(atom, str):
                    out.add(atom)
                else:
                    for arg in atom[1]:
                        out |= arg.symbols()
        return frozenset(out)

    # -- evaluation ---------------------------------------------------------------------------------------------
    def evaluate(self, env: Mapping[str, Num], *, smooth: bool = False) -> Num:
        """Value under ``env``.

        Args:
            env: symbol -> int, float or numpy array.
            smooth: read ``floordiv`` and ``ceildiv`` as the plain quotient: no steps between block or shard sizes.

        Raises:
            KeyError: a symbol has no value in ``env``.
        """
        calls = _SMOOTH if smooth else _EXACT
        total: Num = 0
        for mono, coef in self.terms.items():
            value: Num = coef
            for atom, power in mono:
                if isinstance(atom, str):
                    base = env[atom]
                else:
                    base = calls[atom[0]](*(arg.evaluate(env, smooth=smooth) for arg in atom[1]))
                value = value * (base if power == 1 else base**power)
            total = total + value
        return total

    def substitute(self, env: Mapping[str, Dim]) -> Dim:
        """The expression with some symbols replaced by ints or expressions; the others stay."""
        total = Expr.wrap(0)
        for mono, coef in self.terms.items():
            value = Expr.wrap(coef)
            for atom, power in mono:
                if isinstance(atom, str):
                    base = Expr.wrap(env[atom]) if atom in env else symbol(atom)
                else:
                    base = Expr.wrap(_FUNCTIONS[atom[0]](*(arg.substitute(env) for arg in atom[1])))
                for _ in range(power):
                    value = value * base
            total = total + value
        return total.simplified()

    @staticmethod
    def parse(text: str) -> Dim:
        """Inverse of ``str``. Raises :class:`ValueError` on anything that is not a size expression."""
        return _parse(text)


def symbol(name: str) -> Expr:
    """The symbol ``name`` as an expression."""
    return Expr({((name, 1),): 1})


def _call(function: str, *args: Dim) -> Expr:
    return Expr({(((function, tuple(Expr.wrap(a) for a in args)), 1),): 1})


def floordiv(a: Dim, b: Dim) -> Expr:
    """``a // b``; exact divisions cancel, and ``(x + b - 1) // b`` is recognised as ``ceildiv(x, b)``."""
    num, den = Expr.wrap(a), Expr.wrap(b).simplified()
    if isinstance(den, int) and den > 1 and num.terms.get((), 0) == den - 1:
        return _quotient("ceildiv", num - (den - 1), den)
    return _quotient("floordiv", num, den)


def ceildiv(a: Dim, b: Dim) -> Expr:
    """The smallest integer not below ``a / b``; exact divisions cancel."""
    return _quotient("ceildiv", Expr.wrap(a), Expr.wrap(b).simplified())


def _quotient(rounding: str, num: Expr, den: Dim) -> Expr:
    """``num / den``, rounded as ``floordiv`` or ``ceildiv`` does; constants and exact divisions fold."""
    if isinstance(den, int):
        if all(c % den == 0 for c in num.terms.values()):
            return Expr({m: c // den for m, c in num.terms.items()})
        constant = num.simplified()
        if isinstance(constant, int):
            return Expr.wrap(_EXACT[rounding](constant, den))
    return _call(rounding, num, den)


def mod(a: Dim, b: Dim) -> Expr:
    """``a % b``; constants and exact divisions fold."""
    num, den = Expr.wrap(a).simplified(), Expr.wrap(b).simplified()
    if isinstance(den, int):
        if isinstance(num, int):
            return Expr.wrap(num % den)
        if all(c % den == 0 for c in num.terms.values()):
            return Expr.wrap(0)
    return _call("mod", num, den)


def minimum(*args: Dim) -> Expr:
    """The least of the arguments, in a canonical order."""
    return _extreme("min", min, args)


def maximum(*args: Dim) -> Expr:
    """The greatest of the arguments, in a canonical order."""
    return _extreme("max", max, args)


def _extreme(name: str, pick: Callable[[list[int]], int], args: tuple[Dim, ...]) -> Expr:
    wrapped = [Expr.wrap(a) for a in args]
    ints = [w.simplified() for w in wrapped if isinstance(w.simplified(), int)]
    rest = {w for w in wrapped if not isinstance(w.simplified(), int)}
    parts = sorted(rest, key=str)
    if ints:
        parts.append(Expr.wrap(pick([i for i in ints if isinstance(i, int)])))
    return parts[0] if len(parts) == 1 else _call(name, *parts)


_FUNCTIONS: dict[str, Callable[..., Dim]] = {
    "floordiv": floordiv,
    "ceildiv": ceildiv,
    "mod": mod,
    "min": minimum,
    "max": maximum,
}


@lru_cache(maxsize=65536)
def _parse(text: str) -> Dim:
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"not a size expression: {text!r}") from error
    return Expr.wrap(_build(tree, text)).simplified()


def _build(node: ast.AST, text: str) -> Dim:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.Name(id=name):
            return symbol(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -Expr.wrap(_build(operand, text))
        case ast.BinOp(left=left, op=op, right=right):
            a, b = Expr.wrap(_build(left, text)), Expr.wrap(_build(right, text))
            match op:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
                case ast.FloorDiv():
                    return floordiv(a, b)
                case ast.Pow():
                    power = b.simplified()
                    if isinstance(power, int) and power >= 0:
                        out = Expr.wrap(1)
                        for _ in range(power):
                            out = out * a
                        return out
        case ast.Call(func=ast.Name(id=name), args=args) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_build(arg, text) for arg in args))
    raise ValueError(f"not a size expression: {text!r}")


def evaluate(dim: Dim, env: Mapping[str, Num], *, smooth: bool = False) -> Num:
    """Value of a dimension, be it an int or an :class:`Expr`."""
    return dim.evaluate(env, smooth=smooth) if isinstance(dim, Expr) else dim


def substitute(dim: Dim, env: Mapping[str, Dim]) -> Dim:
    """A dimension with some symbols replaced; see :meth:`Expr.substitute`."""
    return dim.substitute(env) if isinstance(dim, Expr) else dim
