"""Size expressions: canonical form, exact and smooth evaluation, parsing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensor_cast.ir.expr import Expr, ceildiv, evaluate, floordiv, maximum, minimum, mod, substitute, symbol

B, Q, S = symbol("B"), symbol("Q"), symbol("S")


def test_order_of_factors_and_terms_does_not_matter():
    assert B * Q * 2 + S == S + Q * (2 * B)
    assert str(B * Q * 2 + S) == str(S + Q * (2 * B)) == "2*B*Q + S"


def test_rounding_up_is_recognised():
    assert ceildiv(S, 8) == (S + 7) // 8
    assert ceildiv(8 * S + 16, 8) == S + 2
    assert floordiv(8 * S + 16, 4) == 2 * S + 4
    assert ceildiv(17, 8).simplified() == 3
    assert floordiv(-1, 8).simplified() == -1


def test_min_and_max_fold_constants_and_are_canonical():
    assert minimum(2048, S) == minimum(S, 2048, 4096)
    assert maximum(3, 5).simplified() == 5
    assert mod(16 * S, 8).simplified() == 0


def test_smooth_reading_drops_rounding():
    expr = B * ceildiv(S, 8)
    assert expr.evaluate({"B": 2, "S": 9}) == 4
    assert expr.evaluate({"B": 2, "S": 9}, smooth=True) == 2 * 9 / 8


def test_arrays_broadcast():
    batch = np.arange(1, 5)[:, None]
    context = np.array([8, 9, 16])
    got = (B * ceildiv(S, 8) + minimum(S, 10)).evaluate({"B": batch, "S": context})
    want = [[b * -(-s // 8) + min(s, 10) for s in context.tolist()] for b in range(1, 5)]
    assert got.tolist() == want


def test_a_missing_symbol_is_named():
    with pytest.raises(KeyError, match="S"):
        (B + S).evaluate({"B": 1})


@pytest.mark.parametrize("text", ["B +", "import os", "B ** -1", "B / 2", "foo(B)", "'B'", "B.x"])
def test_what_is_not_a_size_expression_is_refused(text):
    with pytest.raises(ValueError, match="not a size expression"):
        Expr.parse(text)


exprs = st.recursive(
    st.one_of(st.sampled_from([B, Q, S]), st.integers(-4, 9).map(Expr.wrap)),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda t: t[0] + t[1]),
        st.tuples(inner, inner).map(lambda t: t[0] * t[1]),
        st.tuples(inner, inner).map(lambda t: t[0] - t[1]),
        st.tuples(inner, st.integers(1, 9)).map(lambda t: ceildiv(*t)),
        st.tuples(inner, st.integers(1, 9)).map(lambda t: floordiv(*t)),
        st.tuples(inner, st.integers(1, 9)).map(lambda t: mod(*t)),
        st.tuples(inner, inner).map(lambda t: minimum(*t)),
        st.tuples(inner, inner).map(lambda t: maximum(*t)),
    ),
    max_leaves=8,
)
sizes = st.fixed_dictionaries({"B": st.integers(1, 99), "Q": st.integers(1, 9), "S": st.integers(1, 9999)})


@given(exprs, sizes)
def test_text_and_back_keeps_the_value(expr, env):
    back = Expr.parse(str(expr))
    assert evaluate(back, env) == expr.evaluate(env)
    assert Expr.wrap(back) == expr or Expr.parse(str(back)) == back


@given(exprs, sizes)
def test_substituting_every_symbol_evaluates(expr, env):
    assert substitute(expr, env) == expr.evaluate(env)
    partial = substitute(expr, {"S": env["S"]})
    assert evaluate(partial, env) == expr.evaluate(env)
