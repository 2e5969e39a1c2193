"""Estimates: output lengths, acceptance, cost, and how wrong each of them was."""
