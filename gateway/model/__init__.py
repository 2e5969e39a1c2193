"""Parts of a model that a gateway needs: its tokenizer, its chat template, its output formats."""
