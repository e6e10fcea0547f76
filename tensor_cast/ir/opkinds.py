"""What kind of work an op does, by name: the one table that fusion and pricing share.

A *pointwise* op computes each output element from elements of its inputs; a *row reduction* also folds the last
dimension (mean, softmax, norms). A compiler merges connected ops of these kinds into one kernel. Numbers are FLOPs per
element on the vector units: 1 for an addition, :data:`TRANSCENDENTAL` for an exponential and its kin (the usual
polynomial expansions), 0 for pure data movement.
"""

from __future__ import annotations

#: Vector FLOPs of one exp, log, sine, square root or division.
TRANSCENDENTAL = 8

_MOVE = """_to_copy clone copy copy_ contiguous cat concat stack expand_copy repeat constant_pad_nd fill fill_ zero_
    lift_fresh_copy zeros zeros_like ones ones_like full full_like new_zeros new_ones new_full arange scalar_tensor
    index index_select gather slice_scatter select_scatter scatter scatter_ index_copy masked_scatter flip roll
    repeat_interleave one_hot diagonal_copy tril triu"""
_ONE = """add add_ sub sub_ rsub mul mul_ neg abs relu relu_ maximum minimum clamp clamp_ clamp_min clamp_max where
    masked_fill masked_fill_ eq ne lt le gt ge logical_not logical_and logical_or logical_xor bitwise_not bitwise_and
    bitwise_or bitwise_xor square isnan isinf sign round floor ceil trunc floor_divide remainder scatter_add
    scatter_add_ index_add index_add_ index_put index_put_ addcmul lerp hardtanh"""
_COSTLY = """pow exp log log1p expm1 exp2 log2 sin cos tanh sigmoid silu silu_ gelu gelu_ softplus sqrt rsqrt reciprocal
    div div_ erf elu leaky_relu mish hardswish hardsigmoid polar"""
_REDUCE = "mean sum amax amin max min prod any all norm linalg_vector_norm var argmax argmin"
_ROWS = {
    "softmax": 2 * TRANSCENDENTAL,
    "_softmax": 2 * TRANSCENDENTAL,
    "log_softmax": 2 * TRANSCENDENTAL,
    "_log_softmax": 2 * TRANSCENDENTAL,
    "rms_norm": 4,
    "_fused_rms_norm": 4,
    "layer_norm": 8,
    "native_layer_norm": 8,
    "logsumexp": TRANSCENDENTAL,
    "cumsum": 1,
}
_ORDER = "topk sort argsort bincount histc nonzero unique unique_consecutive searchsorted multinomial"
_VIEWS = """view _unsafe_view reshape permute transpose t expand unsqueeze squeeze slice select split split_with_sizes
    chunk unbind alias detach as_strided diagonal narrow unflatten flatten movedim lift_fresh empty empty_like new_empty
    empty_strided view_as_real view_as_complex sym_size sym_numel _assert_async _assert_scalar"""


def _aten(names: str) -> tuple[str, ...]:
    return tuple(f"aten.{name}" for name in names.split())


#: FLOPs per *output* element of each pointwise op.
POINTWISE: dict[str, int] = {
    **dict.fromkeys(_aten(_MOVE), 0),
    **dict.fromkeys(_aten(_ONE), 1),
    **dict.fromkeys(_aten(_COSTLY), TRANSCENDENTAL),
}

#: FLOPs per *input* element of each op that folds a dimension; fused only where that dimension is the last.
REDUCTION: dict[str, int] = {
    **dict.fromkeys(_aten(_REDUCE), 1),
    **{f"aten.{name}": flops for name, flops in _ROWS.items()},
    # Absolute maximum, scale and rounding of one row or block.
    "tensor_cast.dynamic_quant": 4,
}

#: Ops that touch only the rows they return: their first operand is a table, not something read whole.
LOOK_UPS = (*_aten("index index_select gather embedding"),)

#: Ops that update rows of a buffer by index; a compiler gives them a kernel of their own.
UPDATES = (*_aten("index_put index_put_ index_add index_add_ scatter_add scatter_add_ index_copy"),)

#: Ops that reorder by value: kernels of their own, one comparison per input element and pass.
ORDERING: frozenset[str] = frozenset(_aten(_ORDER))

#: Ops that move no data; a recorder leaves them out, hand-written traces may hold them.
VIEWS: frozenset[str] = frozenset((*_aten(_VIEWS), "_c10d_functional.wait_tensor"))


def is_view(name: str) -> bool:
    """Whether the op costs nothing by nature and does not count in coverage."""
    return name in VIEWS


def vector_flops(name: str) -> int | None:
    """FLOPs per element (see the tables) of a pointwise op, reduction or ordering, None for any other op."""
    if name in ORDERING:
        return 1
    found = POINTWISE.get(name)
    return REDUCTION.get(name) if found is None else found
