"""Models: loading, forward passes, attention."""
