"""The user's settings: other names for models, and the model that is taken without a name.

One JSON file, ``models.json``, in the configuration folder of the platform:
``{"default": "hf:ORG/REPO", "aliases": {"small": "/models/small.gguf"}}``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import attrs

from infercore.engine import atomic
from infercore.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping

FOLDER = "INFERCORE_CONFIG_DIR"
DEFAULT = "INFERCORE_MODEL"
_FILE = "models.json"
_NOT_IN_AN_ALIAS = "/\\: \t\n"


@attrs.frozen(kw_only=True)
class Settings:
    """What the file holds; nothing where there is none."""

    default: str | None = None
    aliases: Mapping[str, str] = attrs.field(factory=dict)


def file_path() -> str:
    """Return the path of the file, there or not: in ``INFERCORE_CONFIG_DIR`` where it is set."""
    own = os.environ.get(FOLDER)
    if own:
        return os.path.join(os.path.expanduser(own), _FILE)
    if sys.platform == "win32":
        base = os.environ.get("APPDATA") or os.path.expanduser("~/AppData/Roaming")
    elif sys.platform == "darwin":
        base = os.path.expanduser("~/Library/Application Support")
    else:
        base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return os.path.join(base, "infercore", _FILE)


def read() -> Settings:
    """Return the settings. Raises `InvalidInputError` for a file that is damaged."""
    path = file_path()
    try:
        with open(path, encoding="utf-8") as file:
            held = json.load(file)
    except (FileNotFoundError, NotADirectoryError):
        return Settings()
    except OSError as error:
        raise _damaged(path, str(error.strerror)) from error
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    return _settings(held, path)


def _settings(held: Any, path: str) -> Settings:
    if not isinstance(held, dict):
        raise _damaged(path, "it is not a JSON object")
    default, aliases = held.get("default"), held.get("aliases", {})
    texts = [default] if default is not None else []
    texts += [*aliases, *aliases.values()] if isinstance(aliases, dict) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise _damaged(path, '"default" is a text, "aliases" an object of texts')
    return Settings(default=default, aliases=aliases)


def _damaged(path: str, why: str) -> InvalidInputError:
    return InvalidInputError(
        f"the settings in {path} cannot be read ({why}); fix or delete the file",
        field="models.json",
        value=path,
    )


def write(settings: Settings) -> None:
    """Write the settings. Raises OSError; the older file stays then."""
    path = file_path()
    os.makedirs(os.path.dirname(path), exist_ok=True)
    aliases = dict(sorted(settings.aliases.items()))
    held = {"default": settings.default, "aliases": aliases}
    atomic.write_whole(path, (json.dumps(held, indent=2, ensure_ascii=False) + "\n").encode())


def with_alias(settings: Settings, alias: str, model: str | None) -> Settings:
    """Return ``settings`` in which ``alias`` means ``model``; None takes the alias away.

    Raises `InvalidInputError` for an alias that looks like a path or a name, or is not there.
    """
    aliases = dict(settings.aliases)
    if model is None:
        if alias not in aliases:
            known = ", ".join(sorted(aliases)) or "none"
            raise InvalidInputError(
                f"there is no alias {alias!r} (aliases: {known})", field="alias", value=alias
            )
        del aliases[alias]
    else:
        if not alias or any(c in alias for c in _NOT_IN_AN_ALIAS) or alias.startswith(("~", "-")):
            raise InvalidInputError(
                f"{alias!r} cannot be an alias: it may hold no slash, colon or space, and not "
                "begin with ~ or -",
                field="alias",
                value=alias,
            )
        aliases[alias] = model
    return attrs.evolve(settings, aliases=aliases)


def default_model() -> str | None:
    """Return the model that is taken without a name: ``INFERCORE_MODEL``, else the setting."""
    return os.environ.get(DEFAULT) or read().default
