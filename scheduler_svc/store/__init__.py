"""The record: every accepted request, its committed tokens, its lease and its place in the queue, in Redis or
Valkey.
"""
