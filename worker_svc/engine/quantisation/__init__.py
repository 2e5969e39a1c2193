"""Quantised weights: linear layers, and the checkpoints that have them."""
