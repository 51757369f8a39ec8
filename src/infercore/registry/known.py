"""The backends that this project offers, so that a missing one can be named."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import attrs

from infercore.values import install

if TYPE_CHECKING:
    from collections.abc import Callable

GGUF_MAGIC = b"GGUF"
IR_NAME = "openvino_model.xml"


@attrs.frozen(kw_only=True)
class KnownBackend:
    """A backend, how to get it, and whether a path looks like one of its models."""

    name: str
    formats: str
    looks_like: Callable[[str], bool]

    @property
    def install(self) -> str:
        """The command that installs it."""
        return install.plugin(self.name)


def looks_like_gguf(path: str) -> bool:
    """Return whether ``path`` is named like a GGUF file or begins like one."""
    if path.lower().endswith(".gguf"):
        return True
    try:
        with open(path, "rb") as file:
            return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    except OSError:
        return False


def looks_like_openvino(path: str) -> bool:
    """Return whether ``path`` is an XML file or a folder that holds an OpenVINO model."""
    return path.lower().endswith(".xml") or os.path.isfile(os.path.join(path, IR_NAME))


KNOWN = {
    known.name: known
    for known in (
        KnownBackend(name="llamacpp", formats="GGUF files", looks_like=looks_like_gguf),
        KnownBackend(
            name="openvino", formats="OpenVINO IR folders", looks_like=looks_like_openvino
        ),
    )
}


def known_for(path: str) -> KnownBackend | None:
    """Return the known backend that reads such a path, None where there is none."""
    return next((known for known in KNOWN.values() if known.looks_like(path)), None)
