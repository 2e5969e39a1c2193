"""LAPS-SD serves language models with speculative decoding, and orders requests by live acceptance.

This package is what the services share and what a user imports; it knows no service.
"""

__version__ = "0.1.0"
