"""Cost functions, one module per family of ops; importing the package registers them all."""

from tensor_cast.performance_model.costs import assumed, attention, collectives, dsa, gemm, moe, pointwise, sampling

__all__ = ["assumed", "attention", "collectives", "dsa", "gemm", "moe", "pointwise", "sampling"]
