"""Kernels in C for a CPU, and their bindings."""
