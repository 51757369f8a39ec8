"""The guards around a plugin's model, tokenizer and context: checks and books kept once."""
