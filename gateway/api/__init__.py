"""Interfaces for clients: gRPC, the Open Inference Protocol, and OpenAI's API over HTTP."""
