"""Calls of tools in a model's output: how each family of models writes them, for reading and for constraints."""
