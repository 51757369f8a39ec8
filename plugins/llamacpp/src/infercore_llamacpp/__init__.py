"""The llama.cpp backend of infercore. Nothing here is imported by users: see `infercore`."""

__version__ = "0.1.0"
