"""Substitutes for the parts of a model that engines do differently, and the cutting of models for one rank."""
