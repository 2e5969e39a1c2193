"""Parts of `laps-sd bench vllm`."""
