"""Serving engines: their defaults, their KV cache, their reading of decode context parallelism."""
