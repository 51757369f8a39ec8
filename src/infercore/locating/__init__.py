"""Where the model is that somebody names: a path, the hub, the model pack or an alias."""

from infercore.locating.locate import locate, title

__all__ = ["locate", "title"]
