"""Chat: a model's own template, rendered in a sandbox."""
