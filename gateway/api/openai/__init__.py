"""OpenAI's JSON to our messages and back: chat completions, completions, models, errors. Pure."""
