"""Scripts that measure: run them from the top of a checkout, ``python -m benchmarks.<name>``."""
