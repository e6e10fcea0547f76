"""From a Hugging Face configuration to a trace; with layers and ops the only place that imports torch."""
