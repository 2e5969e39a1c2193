"""Placement of requests on workers."""
