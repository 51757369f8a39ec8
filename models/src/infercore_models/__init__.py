"""Small trained models, each in several formats, with the outputs that an engine must reproduce."""

from infercore_models._catalogue import UnknownFormatError, UnknownModelError, names, path
from infercore_models._golden import Golden, GoldenPrompt, golden

__all__ = [
    "Golden",
    "GoldenPrompt",
    "UnknownFormatError",
    "UnknownModelError",
    "golden",
    "names",
    "path",
]
