"""What a gateway needs of a model: its tokenizer, its chat template, its output formats."""
