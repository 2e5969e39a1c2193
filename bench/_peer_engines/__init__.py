"""Engines, as `bench/_peer_driver.py` runs them in interpreters of their own: nothing here imports more
than the standard library and the engine."""
