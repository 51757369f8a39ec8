"""From what somebody calls a model to the path that a backend reads."""

from __future__ import annotations

import contextlib
import importlib
import os
import re

from infercore.errors import (
    InvalidInputError,
    ModelFormatError,
    ModelLoadError,
    ModelNotFoundError,
)
from infercore.locating import hub, settings
from infercore.locating.variants import IR_NAME, variants
from infercore.registry import default_registry
from infercore.registry.environment import default_backend
from infercore.values import checks, install
from infercore.values.checks import nearest

HUB, PACK = "hf:", "pack:"
_PACKED = {
    "gguf": ("gguf-q8_0", "gguf-f16", "gguf-f32"), "openvino": ("openvino",), "hf": ("hf",),
}  # fmt: skip
_ADAPTER = "-lora"
_SNAPSHOT = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/[^/]+((?:/.+)?)$")
_FORMATS = frozenset(packed for all_of_one in _PACKED.values() for packed in all_of_one)
_ADDRESS = re.compile(r"https?://[^/?#]+/?([^?#]*).*", re.IGNORECASE)
_ON_THE_HUB = re.compile(r"([\w.-]+/[\w.-]+)(?:/\w+/\w+(?:/(.+))?)?/?")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def locate(name: str | os.PathLike[str], *, backend: str | None = None) -> str:
    """Return the path of the model ``name``; what is not here yet is fetched from the hub.

    ``name`` is a path (``~`` for the home folder; a folder with one GGUF means that file),
    ``hf:ORG/REPO``, ``hf:ORG/REPO:QUANT`` or ``hf:ORG/REPO:FILE``, ``pack:MODEL`` or
    ``pack:MODEL:FORMAT``, or an alias. A path that is there goes first.

    Raises `ModelNotFoundError`, `ModelFormatError`, `ModelLoadError` where the hub cannot be
    reached or refuses, `UnsupportedFeatureError` without the extra ``hub``, `InvalidInputError`.
    """
    if not isinstance(name, (str, os.PathLike)):
        raise checks.refuse("path", name, "a path, as str or os.PathLike")
    where = os.fspath(name)
    if (path := _there(where)) is not None:
        return path
    if not is_name(where):
        where = settings.read().aliases.get(where, where) if _may_be_an_alias(where) else where
        if (path := _there(where)) is not None:
            return path
    if where.startswith(HUB):
        return hub.fetch(where[len(HUB) :], kinds=readable_kinds(backend))
    if where.startswith(PACK):
        return _packed(where[len(PACK) :], backend)
    raise ModelNotFoundError(f"there is no model at {where!r}; {_what_to_do(where)}", path=where)


def title(path: str) -> str:
    """Return what to call the model at ``path``: its file or folder, for short.

    A folder of the hub's cache is called as its repository is, one that is named after its format
    with the folder above it.
    """
    path = os.path.abspath(path)
    name, above = os.path.basename(path), os.path.basename(os.path.dirname(path))
    if not os.path.isdir(path):
        return name
    if found := _SNAPSHOT.search(path.replace(os.sep, "/")):
        return f"{found[1]}/{found[2]}{found[3]}"
    return f"{above}/{name}" if name in _FORMATS else name


def is_name(text: str) -> bool:
    """Return whether ``text`` names a model of the hub or of the pack."""
    return text.startswith((HUB, PACK))


def is_model(text: str) -> bool:
    """Return whether ``text`` can be told from a prompt: a name, an alias, a path."""
    path = os.path.expanduser(text)
    return (
        is_name(text)
        or text in settings.read().aliases
        or path.lower().endswith((".gguf", ".xml"))
        or ("\0" not in path and os.path.exists(path))
    )


def readable_kinds(backend: str | None = None) -> list[str]:
    """Return the formats that ``backend`` reads, or those of all that can be used here."""
    named = backend or default_backend()
    infos = [info for info in default_registry().infos(devices=False) if info.available]
    named_ones = [info for info in infos if info.name == named]
    return [kind for info in named_ones or infos for kind in info.formats]


def _may_be_an_alias(text: str) -> bool:
    return os.path.basename(text) == text and text not in {"", ".", ".."}


def _there(where: str) -> str | None:
    """Return the path of what is there, None where nothing is."""
    path = os.path.expanduser(where)
    try:
        if not where or not os.path.exists(path):
            return None
    except ValueError as error:
        raise checks.refuse("path", where, "a path without NUL characters") from error
    if os.path.isdir(path):
        return _in_folder(path)
    if not os.path.isfile(path):
        raise ModelFormatError(
            f"{where!r} is neither a file nor a folder, but a pipe or a device; give the model's "
            "own path",
            path=where,
        )
    return path


def _in_folder(folder: str) -> str:
    """Return the one GGUF of ``folder``, or the folder where it is a model itself."""
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise ModelLoadError(f"{folder} cannot be read: {error.strerror}", path=folder) from error
    found = [each for each in variants(names) if each.kind == "gguf"]
    if not found or {IR_NAME, "config.json"} & set(names):
        return folder
    if len(found) > 1:
        listed = ", ".join(each.main for each in found)
        raise ModelNotFoundError(
            f"{folder} holds several models; name one of them: {listed}", path=folder
        )
    return os.path.join(folder, found[0].main)


def _packed(text: str, backend: str | None) -> str:
    """Return the path of a model of the pack, in a format that is read here."""
    name, _, wanted = text.partition(":")
    try:
        pack = importlib.import_module("infercore_models")
    except ImportError as error:
        raise ModelNotFoundError(
            f"the model pack is not installed; run: {install.model_pack()}", path=PACK + text
        ) from error
    there = pack.names()
    if name not in there:
        raise ModelNotFoundError(
            f"the pack has no model {name!r}; {nearest(name, list(there))}", path=PACK + text
        )
    if wanted and wanted not in there[name]:
        raise ModelNotFoundError(
            f"the pack has no {name} as {wanted!r}; it has {', '.join(there[name])}",
            path=PACK + text,
        )
    formats = [packed for kind in readable_kinds(backend) for packed in _PACKED.get(kind, ())]
    usable = [wanted] if wanted else [packed for packed in formats if packed in there[name]]
    if not usable:
        raise ModelNotFoundError(
            f"no installed backend reads {name} of the pack, which is there as "
            f"{', '.join(there[name])}; run: {install.plugin('openvino')}",
            path=PACK + text,
        )
    return str(pack.path(name, usable[0]))


def _what_to_do(where: str) -> str:
    """Say how one gets the model that ``where`` may mean."""
    if _ADDRESS.fullmatch(where):
        return _instead_of(where)
    if _REPOSITORY.fullmatch(where) and not where.lower().endswith((".gguf", ".xml")):
        return f"check the path, or write hf:{where} to fetch it from the hub"
    if where in _pack_names():
        return f"check the path, or write pack:{where} for the model of the pack"
    return (
        "check the path, or use pack:storyteller to try things out, or hf:ORG/REPO to fetch a "
        "model; "
        f"see {install.GET_A_MODEL}"
    )


def _instead_of(address: str) -> str:
    """Say what to write in place of a web address."""
    text = "infercore fetches models from the hub only, by name"
    place = _ADDRESS.fullmatch(address)
    found = place and _ON_THE_HUB.fullmatch(place[1])
    if not found or found[1].lower().endswith((".gguf", ".xml", ".zip")):
        return f"{text} (hf:ORG/REPO); from elsewhere, download the file first and give its path"
    name = found[1] + (f":{found[2]}" if found[2] else "")
    return f"{text}: there it is hf:{name}; from elsewhere, download the file first"


def pack_models(backend: str | None = None) -> list[tuple[str, str]]:
    """Return name and path of each model of the pack that can be read here."""
    found = []
    for name in _pack_names():
        if name.endswith(_ADAPTER):
            continue
        with contextlib.suppress(ModelNotFoundError):
            found.append((PACK + name, _packed(name, backend)))
    return found


def _pack_names() -> tuple[str, ...]:
    try:
        return tuple(importlib.import_module("infercore_models").names())
    except ImportError:
        return ()


def refuse_fetching(name: str) -> None:
    """Raise `InvalidInputError` where ``name`` is none of the hub's, and cannot be fetched."""
    if _ADDRESS.fullmatch(name):
        said = f"{name!r} is an address; {_instead_of(name)}"
        raise InvalidInputError(said, field="name", value=name)
    if not name.startswith(HUB):
        raise InvalidInputError(
            f"{name!r} is not on the hub; give hf:ORG/REPO, hf:ORG/REPO:QUANT or hf:ORG/REPO:FILE",
            field="name",
            value=name,
        )
