"""Keeping float64 where a model's code goes down to float32 for a norm, a softmax or its routing.

Transformers computes those in float32 whatever the model's dtype is, which limits how close two float64 runs can come
to one part in 10^7 and hides small faults under rounding. Under :class:`KeepDouble` such conversions do nothing, in the
reference and in the program alike; what is left is the noise of float64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
_CONVERSIONS = frozenset([_ATEN.to, _ATEN._to_copy])
_WITH_DTYPE = frozenset([_ATEN.softmax, _ATEN._softmax, _ATEN.log_softmax, _ATEN.sum, _ATEN.mean, _ATEN.cumsum])
_NARROW = frozenset([torch.float32, torch.float16, torch.bfloat16])


class KeepDouble(TorchDispatchMode):
    """While active, float64 tensors stay float64 where they would be converted to a narrower floating type."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if (packet in _CONVERSIONS or packet in _WITH_DTYPE) and _double(args[0]):
            args = tuple(torch.float64 if isinstance(a, torch.dtype) and a in _NARROW else a for a in args)
            if kwargs.get("dtype") in _NARROW:
                kwargs = {**kwargs, "dtype": torch.float64}
        elif packet is _ATEN.type_as and _double(args[0]) and args[1].dtype in _NARROW:
            return args[0]
        return func(*args, **kwargs)


def _double(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype == torch.float64
