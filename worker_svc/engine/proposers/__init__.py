"""Proposers of draft tokens that need no model."""
