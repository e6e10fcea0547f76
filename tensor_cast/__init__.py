"""MsModeling's library: trace a model once, price it on any device, layout and engine.

Everything is imported on first use, so ``import tensor_cast`` costs nothing.

    >>> import tensor_cast
    >>> view = tensor_cast.trace("Qwen/Qwen3-32B", tp_size=8, phase="decode")        # doctest: +SKIP
    >>> result = tensor_cast.estimate("Qwen/Qwen3-32B", device="H200_SXM", tp_size=8,
    ...                               num_queries=64, context_length=4096)           # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensor_cast.core.model_runner import ModelRunner, RunResult
    from tensor_cast.core.trace_view import TraceView
    from tensor_cast.core.user_config import UserInputConfig

__all__ = ["ModelRunner", "UserInputConfig", "estimate", "trace"]


def trace(
    model: str | UserInputConfig,
    *,
    batch_size: int | None = None,
    query_len: int | None = None,
    context_len: int | None = None,
    stage: int | None = None,
    use_cache: bool = True,
    **options: Any,
) -> TraceView:
    """Trace one step of a model on one rank.

    Args:
        model: hub id of an embedded config, a local folder, or a whole :class:`UserInputConfig`.
        batch_size: requests of one rank (B). Each size left out stays a symbol.
        query_len: tokens of a request in this step (Q).
        context_len: tokens of a request in the cache, this step's included (S); 0 means a fresh prompt (S = Q).
        stage: which pipeline stage (with ``pp_size``); the first by default.
        use_cache: read and fill the trace cache.
        options: fields of :class:`UserInputConfig` (``tp_size=8, dcp_size=4, phase="decode"`` ...).

    Raises:
        MsModelingError: bad input, see :mod:`tensor_cast.errors`.
    """
    from tensor_cast.core.trace_view import view_trace

    return view_trace(
        _config(model, options),
        batch_size=batch_size,
        query_len=query_len,
        context_len=context_len,
        stage=stage,
        use_cache=use_cache,
    )


def estimate(model: str | UserInputConfig, *, use_cache: bool = True, **options: Any) -> RunResult:
    """Price one step of a model on one device: time by op, bound and memory.

    Args:
        model: hub id of an embedded config, a local folder, or a whole :class:`UserInputConfig`.
        use_cache: read and fill the trace cache.
        options: fields of :class:`UserInputConfig`; ``device`` is needed.

    Raises:
        MsModelingError: bad input, see :mod:`tensor_cast.errors`.
    """
    from tensor_cast.core.model_runner import ModelRunner

    return ModelRunner(_config(model, options), use_cache=use_cache).run()


def _config(model: str | UserInputConfig, options: dict[str, Any]) -> UserInputConfig:
    from tensor_cast.core.user_config import UserInputConfig

    if isinstance(model, UserInputConfig):
        return model.model_copy(update=options)
    return UserInputConfig.create(model=model, **options)


def __getattr__(name: str) -> Any:
    if name == "ModelRunner":
        from tensor_cast.core.model_runner import ModelRunner

        return ModelRunner
    if name == "UserInputConfig":
        from tensor_cast.core.user_config import UserInputConfig

        return UserInputConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
