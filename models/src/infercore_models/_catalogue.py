"""Which models there are, and where their files lie."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

DATA = Path(__file__).parent / "data"

FILES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "storyteller": MappingProxyType(
            {
                "hf": "hf",
                "gguf-f32": "storyteller-f32.gguf",
                "gguf-q8_0": "storyteller-q8_0.gguf",
                "openvino": "openvino",
            }
        ),
        "agent": MappingProxyType(
            {
                "hf": "hf",
                "gguf-f32": "agent-f32.gguf",
                "gguf-q8_0": "agent-q8_0.gguf",
                "openvino": "openvino",
            }
        ),
        "storyteller-draft": MappingProxyType(
            {"gguf-f32": "storyteller-draft-f32.gguf", "openvino": "openvino"}
        ),
        "storyteller-lora": MappingProxyType({"hf": "hf", "gguf-f32": "storyteller-lora-f32.gguf"}),
        "encoder": MappingProxyType(
            {"hf": "hf", "gguf-f32": "encoder-f32.gguf", "openvino": "openvino"}
        ),
        "recurrent": MappingProxyType({"gguf-f32": "recurrent-f32.gguf", "openvino": "openvino"}),
        "sliding": MappingProxyType({"gguf-f32": "sliding-f32.gguf"}),
    }
)


STORYTELLERS = ("storyteller", "agent")  # those with golden logits and greedy tokens
ENCODERS = ("encoder",)  # those with golden embeddings


class UnknownModelError(LookupError):
    """No model has this name; ``known`` holds the names there are."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        self.known = tuple(known)
        super().__init__(f"no model is named {name!r}; choose from: {', '.join(self.known)}")


class UnknownFormatError(LookupError):
    """The model is not here in this format; ``known`` holds the formats there are."""

    def __init__(self, name: str, format: str, known: Iterable[str]) -> None:
        self.name = name
        self.format = format
        self.known = tuple(known)
        super().__init__(
            f"model {name!r} has no format {format!r}; choose from: {', '.join(self.known)}"
        )


def names() -> dict[str, tuple[str, ...]]:
    """Every model's name, with the formats it is here in."""
    return {name: tuple(formats) for name, formats in FILES.items()}


def folder(name: str) -> Path:
    """Where everything about one model lies."""
    if name not in FILES:
        raise UnknownModelError(name, FILES)
    return DATA / name


def path(name: str, format: str) -> Path:
    """The model in that format: a file for GGUF, a folder for the others.

    Raises `UnknownModelError` or `UnknownFormatError`, both `LookupError`.
    """
    home = folder(name)
    if format not in FILES[name]:
        raise UnknownFormatError(name, format, FILES[name])
    return home / FILES[name][format]
