"""What clients call: gRPC, the Open Inference Protocol, and OpenAI's API over HTTP."""
