"""The entry: what this backend is called and what it reads. It imports no engine."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from infercore import API_VERSION, BackendDescriptor, ModelConfig, hookimpl
from infercore_openvino.plugin import match as reads

_SHARE = 0.5  # of the score of infercore-openvino, which can do more with the same files


def match(path: str) -> float:
    """Return how well this backend reads ``path``."""
    return _SHARE * reads(path)


def load(path: str, config: ModelConfig) -> Any:
    """Return the model at ``path``; the engine is imported here, when it is first needed."""
    from infercore_openvino_genai.backend import Model  # noqa: PLC0415

    return Model(path, config)


def version() -> str:
    """Return the engine's version."""
    return metadata.version("openvino-genai")


@hookimpl
def infercore_backend() -> BackendDescriptor:
    """Return the descriptor that infercore asks plugins for."""
    return BackendDescriptor(
        name="openvino-genai",
        api_version=API_VERSION,
        summary="openvino_genai's continuous batching, which generates by itself, as an example",
        formats=("openvino",),
        match=match,
        loader=load,
        engine_version=version,
    )
