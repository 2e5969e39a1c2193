"""From logits to tokens: logits processors, output formats, noise, acceptance of draft tokens, stop
conditions."""
