"""Operator of LAPS-SD: keeps the number of workers that each SpeculativePool sets, and drains workers before
it removes them.
"""
