"""Measures a model on a machine, and makes models to measure."""
