"""Cost functions, one module per family of ops; importing the package registers them all."""

from tensor_cast.performance_model.costs import attention, collectives, gemm, moe, pointwise, sampling

__all__ = ["attention", "collectives", "gemm", "moe", "pointwise", "sampling"]
