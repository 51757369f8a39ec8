"""The command ``infercore``."""

from infercore.cli.app import main

__all__ = ["main"]
