"""How the parts of infercore are installed: the advice that errors and help give, in one place."""

from __future__ import annotations

import functools

_CORE = "infercore"


@functools.cache
def from_an_index() -> bool:
    """Return whether infercore itself was installed by name, so that its other parts can be too.

    Installers write ``direct_url.json`` (PEP 610) for what came from a folder, a file or a
    repository, and none for what came from an index. Sources that run without being installed
    have no metadata: they are a checkout.
    """
    import importlib.metadata  # noqa: PLC0415  (slow to import, and only errors need it)

    try:
        return importlib.metadata.distribution(_CORE).read_text("direct_url.json") is None
    except importlib.metadata.PackageNotFoundError:
        return False


def of_extra(name: str) -> str:
    """Return the command that adds the optional packages ``name``."""
    return _command(f"'{_CORE}[{name}]'", f"'.[{name}]'")


def plugin(name: str) -> str:
    """Return the command that installs the backend ``name`` of this project."""
    return _command(f"{_CORE}-{name}", f"./plugins/{name}")


def model_pack() -> str:
    """Return the command that installs the small models for trying things out."""
    return _command(f"{_CORE}-models", "./models")


def _command(by_name: str, in_a_checkout: str) -> str:
    if from_an_index():
        return f"pip install {by_name}"
    return f"pip install {in_a_checkout} (in a checkout of infercore)"


REPOSITORY = ""
"""The address of the repository; while it is empty no page, error or metadata names one."""

GET_A_MODEL = "docs/how-to/get-a-model.md"
"""The page that says where models come from."""
