"""Small trained models, each in several formats, with the outputs that an engine must reproduce."""

from infercore_models._catalogue import UnknownFormatError, UnknownModelError, names, path
from infercore_models._golden import (
    Golden,
    GoldenBeam,
    GoldenBeams,
    GoldenPrompt,
    golden,
    golden_beams,
)
from infercore_models._golden_texts import GoldenText, golden_texts

__all__ = [
    "Golden",
    "GoldenBeam",
    "GoldenBeams",
    "GoldenPrompt",
    "GoldenText",
    "UnknownFormatError",
    "UnknownModelError",
    "golden",
    "golden_beams",
    "golden_texts",
    "names",
    "path",
]
