"""What a model is to kvhub: its identity, geometry, RoPE and tokenizer."""
