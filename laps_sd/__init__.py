"""LAPS-SD serves language models with speculative decoding, and runs the requests first that need the
least machine time.

This package is what the services share and what a user imports; it knows no service.
"""

__version__ = "0.1.0"
