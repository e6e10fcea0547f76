"""The trace as a value: size expressions, records, composition, storage."""
