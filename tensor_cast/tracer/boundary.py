"""The last resort of the tracer: whatever torch or Transformers raise becomes one sentence, with its cause chained.

A model that we do not understand may fail anywhere, in code of its own. For a user that is not a crash but an answer:
which model, where in it, what happened, what to do.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch._ops import OpOverload

from tensor_cast.errors import MsModelingError, UnsupportedModelError
from tensor_cast.layers.modules import path_of
from tensor_cast.model_config import ModelConfig
from tensor_cast.tracer.builder import one_line

#: What a user can do about a model that is not understood.
REMEDY = "docs/models.md lists the families that are traced; report this one if it should be among them"


@contextmanager
def plain_errors(model: ModelConfig) -> Iterator[None]:
    """Turn exceptions of the block into :class:`UnsupportedModelError`; errors of ours pass, but name the model.

    Args:
        model: what is being built or traced.

    Raises:
        UnsupportedModelError: the block failed. The exception itself is the ``__cause__``.
    """
    name = f"{model.model_id} ({model.model_type})"
    try:
        yield
    except UnsupportedModelError as error:
        if model.model_id in str(error):
            raise
        raise UnsupportedModelError(f"{name}: {error}") from error
    except MsModelingError:
        raise
    except Exception as error:
        raise UnsupportedModelError(f"{name} cannot be traced: {one_line(error)}{_place(error)}; {REMEDY}.") from error


def _place(error: BaseException) -> str:
    """The innermost module and op that were running: `` in model.layers.0.mlp (QwenMLP), aten.view``."""
    module, op = "", ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        values = frame.f_locals
        inside, func = values.get("self"), values.get("func")
        if isinstance(inside, nn.Module):
            path = path_of(inside)
            module, op = f"{path} ({type(inside).__name__})" if path else type(inside).__name__, ""
        if isinstance(func, OpOverload):
            op = f"{func.namespace}.{func._schema.name.partition('::')[2]}"
    words = ", ".join(word for word in (module, op) if word)
    return f" in {words}" if words else ""
