"""The place where the torch wing and the performance model meet: user configuration in, results out."""
