"""The entry: what this backend is called and what it reads. It imports no engine."""

from __future__ import annotations

from typing import Any

from infercore import API_VERSION, BackendDescriptor, ModelConfig, hookimpl


def match(path: str) -> float:
    """Return how well this backend reads ``path``."""
    return 100.0 if path.endswith(".tablelm.json") else 0.0


def load(path: str, config: ModelConfig) -> Any:
    """Return the model at ``path``; the engine is imported here, when it is first needed."""
    from infercore_frozenlm.backend import Model

    return Model(path, config)


def version() -> str:
    """Return the engine's version."""
    from infercore_frozenlm.backend import engine_version

    return engine_version()


@hookimpl
def infercore_backend() -> BackendDescriptor:
    """Return the descriptor that infercore asks plugins for."""
    return BackendDescriptor(
        name="frozenlm",
        api_version=API_VERSION,
        summary="Tables of counts, as an example",
        formats=("frozenlm",),
        match=match,
        loader=load,
        engine_version=version,
    )
