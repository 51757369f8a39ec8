"""How the parts of infercore are installed: the advice that errors and help give, in one place."""

from __future__ import annotations

ON_AN_INDEX = False
"""Whether the distributions can be had by name; until then the advice is for a checkout."""


def of_extra(name: str) -> str:
    """Return the command that adds the optional packages ``name``."""
    if ON_AN_INDEX:
        return f"pip install 'infercore[{name}]'"
    return f"pip install '.[{name}]' (in a checkout of infercore)"


def plugin(name: str) -> str:
    """Return the command that installs the backend ``name`` of this project."""
    if ON_AN_INDEX:
        return f"pip install infercore-{name}"
    return f"pip install ./plugins/{name} (in a checkout of infercore)"


def model_pack() -> str:
    """Return the command that installs the small models for trying things out."""
    if ON_AN_INDEX:
        return "pip install infercore-models"
    return "pip install ./models (in a checkout of infercore)"


REPOSITORY = ""
"""The address of the repository; while it is empty no page, error or metadata names one."""

GET_A_MODEL = "docs/how-to/get-a-model.md"
"""The page that says where models come from."""
