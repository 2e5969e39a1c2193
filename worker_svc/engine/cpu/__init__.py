"""Kernels in C for one CPU thread, and their bindings."""
