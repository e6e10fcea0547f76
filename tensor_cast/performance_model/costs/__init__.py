"""Cost functions, one module per family of ops; importing the package registers them all."""

from tensor_cast.performance_model.costs import attention, collectives, dsa, gemm, moe, pointwise, sampling

__all__ = ["attention", "collectives", "dsa", "gemm", "moe", "pointwise", "sampling"]
