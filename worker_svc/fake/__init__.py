"""Engines with scripted tokens, for tests and benchmarks."""
