"""Models of the hub, through `huggingface_hub`: its cache, its tokens, its way to be offline."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import importlib
import inspect
import os
import re
import sys
from typing import TYPE_CHECKING, Any

import attrs

from infercore.errors import (
    InferCoreError,
    InvalidInputError,
    ModelLoadError,
    ModelNotFoundError,
    UnsupportedFeatureError,
)
from infercore.locating import partial
from infercore.locating.variants import Variant, chosen, variants
from infercore.values import checks, install

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_CHUNK_BYTES = 1 << 22
_REVISION = re.compile("[0-9a-f]{40}([0-9a-f]{24})?")  # it becomes a part of a path
_SHA256 = re.compile("[0-9a-f]{64}")
_MAX_FILES, _MAX_NAME, _MAX_BYTES = 100_000, 1000, 1 << 50
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".onnx")


@attrs.frozen(kw_only=True)
class HubName:
    """``ORG/REPO`` and what of it is wanted."""

    repo: str
    wanted: str | None

    def __str__(self) -> str:
        return f"hf:{self.repo}" + (f":{self.wanted}" if self.wanted else "")


@attrs.frozen(kw_only=True)
class Held:
    """A model in the cache."""

    repo: str
    variant: Variant
    path: str
    size_bytes: int


def parsed(text: str) -> HubName:
    """Return the parts of ``ORG/REPO[:QUANT or FILE]``. Raises `InvalidInputError`."""
    repo, colon, wanted = text.partition(":")
    organisation, slash, name = repo.partition("/")
    if not (organisation and slash and name) or "/" in name or (colon and not wanted):
        raise InvalidInputError(
            f"'hf:{text}' is not the name of a model on the hub; write hf:ORG/REPO, "
            f"hf:ORG/REPO:QUANT or "
            "hf:ORG/REPO:FILE",
            field="path",
            value=f"hf:{text}",
        )
    return HubName(repo=repo, wanted=wanted or None)


def fetch(text: str, *, kinds: Sequence[str], update: bool = False) -> str:
    """Return the path of the model ``ORG/REPO[:QUANT or FILE]``, fetched if it is not here yet.

    What the cache holds is taken as it is, without a request; ``update`` asks the hub for a newer
    one. Each file that comes is compared with the hub's checksum. Raises `ModelNotFoundError`,
    `ModelLoadError` (no network, refused, damaged, no room), `UnsupportedFeatureError` without
    the extra ``hub``; whole files that came before that stay in the cache.
    """
    name = parsed(text)
    library = _library()
    if not update and (path := _cached(library, name, kinds)) is not None:
        return path
    with _typed(library, name):
        revision, siblings = _listed(library, name)
        variant = _one(name, variants(siblings), kinds, siblings)
        paths = {file: _download(library, name, siblings[file], revision) for file in variant.files}
        _mark_as_main(library, name, variant)
    main = paths[variant.main]
    return os.path.dirname(main) if variant.kind == "openvino" else main


def held() -> list[Held]:
    """Return the models of the hub's cache; none without the extra ``hub``."""
    try:
        library = _library()
    except UnsupportedFeatureError:
        return []
    return [each for repo in _repositories(library) for each in _held(library, repo)]


# -- the cache -------------------------------------------------------------------------------------


def _cached(library: Any, name: HubName, kinds: Sequence[str]) -> str | None:
    found = _held(library, name.repo)
    wanted = chosen([each.variant for each in found], name.wanted, kinds)
    if name.wanted is None and len(wanted) != 1:
        return None
    return next((each.path for each in found if wanted and each.variant == wanted[0]), None)


def _repositories(library: Any) -> list[str]:
    try:
        folders = sorted(os.listdir(library.constants.HF_HUB_CACHE))
    except OSError:
        return []
    named = [folder.split("--") for folder in folders]
    return [f"{parts[1]}/{'--'.join(parts[2:])}" for parts in named
            if len(parts) > 2 and parts[0] == "models"]  # fmt: skip  # noqa: PLR2004


def _held(library: Any, repo: str) -> list[Held]:
    """The models of a repository in the cache, of its newest snapshot that has each."""
    folder = os.path.join(
        library.constants.HF_HUB_CACHE, "models--" + repo.replace("/", "--"), "snapshots"
    )
    found: dict[str, Held] = {}
    for snapshot in _newest_first(folder):
        files = dict(_files(snapshot))
        for variant in variants(files):
            size = sum(files[file] for file in variant.files)
            path = os.path.normpath(os.path.join(snapshot, variant.path))
            one = Held(repo=repo, variant=variant, path=path, size_bytes=size)
            found.setdefault(variant.main, one)
    return list(found.values())


def _newest_first(folder: str) -> list[str]:
    """The snapshots in ``folder``: the one that ``main`` is, then the others by their age."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    main = ""
    with contextlib.suppress(OSError), open(os.path.join(folder, "..", "refs", "main")) as file:
        main = file.read().strip()
    paths = {name: os.path.join(folder, name) for name in names}
    order = sorted(names, key=lambda name: (name != main, -_changed(paths[name])))
    return [paths[name] for name in order]


def _changed(path: str) -> float:
    try:
        return os.path.getmtime(path)
    except OSError:  # gone meanwhile
        return 0.0


def _files(snapshot: str) -> Iterator[tuple[str, int]]:
    """The files of a snapshot with their sizes; links to nowhere are left out."""
    for folder, _, names in os.walk(snapshot):
        for name in names:
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                yield os.path.relpath(path, snapshot).replace(os.sep, "/"), os.path.getsize(path)


# -- what comes from the hub -----------------------------------------------------------------------


def _listed(library: Any, name: HubName) -> tuple[str, dict[str, _Sibling]]:
    """Return the newest revision and its files: what becomes a path here is looked at first.

    Raises `ModelLoadError` for an answer that is none of a hub; files with names that no model has
    are left out.
    """
    try:
        info = library.HfApi().repo_info(name.repo, files_metadata=True)
        revision, files = info.sha, {}
        for each in info.siblings[:_MAX_FILES]:
            if _is_a_name(each.rfilename):
                files[each.rfilename] = _Sibling.of(each)
        if not isinstance(revision, str) or not _REVISION.fullmatch(revision):
            raise ValueError("it names no revision")
    except (
        ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
    ) as error:  # fmt: skip
        if isinstance(error, library.errors.HFValidationError):
            raise
        why = str(error) or type(error).__name__
        raise ModelLoadError(
            f"what the hub says about {name.repo} cannot be read: {checks.shown(why)}; try again "
            "later, or check HF_ENDPOINT",
            path=str(name),
        ) from error
    return revision, files


def _is_a_name(file: Any) -> bool:
    """Return whether ``file`` is the name of a file within a folder, on any system."""
    return (
        isinstance(file, str)
        and file.isprintable()
        and len(file) <= _MAX_NAME
        and not set(file) & set('\\:*?"<>|')
        and not {"", ".", ".."} & set(file.split("/"))
    )


@attrs.frozen
class _Checksum:
    """Of a large file: what `partial` compares and names its parts by."""

    sha256: str
    size: int


@attrs.frozen
class _Sibling:
    """A file of a repository, as the hub lists it."""

    rfilename: str
    blob_id: str | None
    lfs: _Checksum | None

    @classmethod
    def of(cls, listed: Any) -> _Sibling:
        lfs, blob_id = getattr(listed, "lfs", None), getattr(listed, "blob_id", None)
        if lfs is not None:
            lfs = _Checksum(lfs.sha256, lfs.size)
            if not (isinstance(lfs.sha256, str) and _SHA256.fullmatch(lfs.sha256)):
                raise ValueError("a checksum is none")
            if not checks.is_integer(lfs.size) or not 0 <= lfs.size <= _MAX_BYTES:
                raise ValueError("a size is none")
        if not isinstance(blob_id, (str, type(None))):
            raise ValueError("a checksum is none")  # noqa: TRY004  (of what the hub says)
        return cls(listed.rfilename, blob_id, lfs)


def _one(
    name: HubName, found: Sequence[Variant], kinds: Sequence[str], files: Mapping[str, Any]
) -> Variant:
    """Return the model that ``name`` means. Raises `ModelNotFoundError` with what is there."""
    wanted = chosen(found, name.wanted, kinds)
    if len(wanted) == 1:
        return wanted[0]
    if not found:
        raise ModelNotFoundError(f"{name.repo} {_holds_none(files)}", path=str(name))
    labels = [each.label for each in found]
    listed = ", ".join(each.label if labels.count(each.label) == 1 else each.main for each in found)
    if wanted:
        why = f"{name} may be one of several models"
    else:
        why = f"{name.repo} has no model {name.wanted!r}"
    raise ModelNotFoundError(f"{why}; name one of these, as hf:{name.repo}:NAME: {listed}",
                             path=str(name))  # fmt: skip


def _holds_none(files: Mapping[str, Any]) -> str:
    if any(file.lower().endswith(_WEIGHTS) for file in files):
        return (
            "contains weights that must be converted first; look for a repository with GGUF or "
            f"OpenVINO files of it, or see {install.GET_A_MODEL}"
        )
    return "contains no GGUF file and no openvino_model.xml with its weights"


def _download(library: Any, name: HubName, sibling: Any, revision: str) -> str:
    """Return the path of a file in the cache, fetched and compared if it was not there."""
    file = sibling.rfilename
    here = library.try_to_load_from_cache(name.repo, file, revision=revision)
    if isinstance(here, str):
        return here
    bars = _bars(library)
    is_whole = functools.partial(_is_whole, sibling=sibling)
    if partial.download(library, name.repo, sibling, revision, is_whole=is_whole, bars=bars):
        path: str = library.hf_hub_download(name.repo, file, revision=revision, **bars)
        if is_whole(path):
            return path
        for wrong in (os.path.realpath(path), path):
            with contextlib.suppress(OSError):
                os.unlink(wrong)
    raise ModelLoadError(
        f"{file} of {name.repo} was damaged on the way (its checksum is not the hub's) and was "
        "deleted; fetch it again",
        path=str(name),
    )


def _is_whole(path: str, sibling: Any) -> bool:
    """Return whether the file has the checksum that the hub states for it."""
    lfs, blob = getattr(sibling, "lfs", None), getattr(sibling, "blob_id", None)
    if lfs is not None:
        return _digest(path, hashlib.sha256()) == str(lfs.sha256)
    if blob is not None:
        head = f"blob {os.path.getsize(path)}\0".encode()
        return _digest(path, hashlib.sha1(head, usedforsecurity=False)) == str(blob)
    return True


def _digest(path: str, digest: Any) -> str:
    with open(path, "rb") as file:
        for chunk in iter(functools.partial(file.read, _CHUNK_BYTES), b""):
            digest.update(chunk)
    return str(digest.hexdigest())


def _mark_as_main(library: Any, name: HubName, variant: Variant) -> None:
    """Let the cache know that these files are the branch ``main``, or tools that prune drop them.

    Whatever goes wrong: the model is here.
    """
    with contextlib.suppress(Exception):
        library.hf_hub_download(name.repo, variant.main, **_bars(library))


def _bars(library: Any) -> dict[str, Any]:
    """Return what makes the library show its bars on a terminal alone; its old versions cannot."""
    if "tqdm_class" not in inspect.signature(library.hf_hub_download).parameters:
        return {}

    class Bar(library.utils.tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **fields: Any) -> None:
            if sys.stderr is None or not sys.stderr.isatty():
                fields["disable"] = True
            super().__init__(*args, **fields)

    return {"tqdm_class": Bar}


# -- errors ----------------------------------------------------------------------------------------


def _library() -> Any:
    try:
        library = importlib.import_module("huggingface_hub")
        for part in ("constants", "errors", "file_download", "utils"):
            importlib.import_module(f"huggingface_hub.{part}")
    except ImportError as error:
        raise UnsupportedFeatureError(
            feature="models by name (hf:)",
            hint=f"they need the package huggingface_hub; run: {install.of_extra('hub')}",
        ) from error
    return library


@contextlib.contextmanager
def _typed(library: Any, name: HubName) -> Iterator[None]:
    """Raise what the library raises as a typed error in plain words."""
    try:
        yield
    except (InferCoreError, AttributeError, LookupError, NameError, TypeError):
        raise  # those of the program's own mistakes are no news of the hub
    except Exception as error:
        labels = ", ".join(each.variant.label for each in _held(library, name.repo))
        cached = f" (the cache has: {labels})" if labels else ""
        raise _told(library.errors, name, error, cached) from error


def _told(  # noqa: PLR0911  (a return for each answer of the hub)
    errors: Any, name: HubName, error: Exception, cached: str
) -> InferCoreError:
    at = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    page = f"{at.rstrip('/')}/{name.repo}"
    path = str(name)
    if isinstance(error, errors.GatedRepoError):
        return ModelLoadError(
            f"{name.repo} is gated: accept its terms at {page}, then run "
            "`hf auth login` or set HF_TOKEN",
            path=path,
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelNotFoundError(
            f"the hub has no model {name.repo}, or it is private; check the name, or log in with "
            "`hf auth login` or HF_TOKEN",
            path=path,
        )
    if isinstance(error, errors.HFValidationError):
        return InvalidInputError(
            f"{name} is not the name of a model on the hub: {error}", field="path", value=path
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        return ModelNotFoundError(
            f"{name} is not in the cache{cached}, and HF_HUB_OFFLINE forbids fetching it", path=path
        )
    if getattr(error, "errno", None) == errno.ENOSPC:
        return ModelLoadError(f"there is no room for {name} on the disk", path=path)
    response = getattr(error, "response", None)
    if response is not None:
        return ModelLoadError(
            f"the hub refused {name} with status {response.status_code}; try again later, or check "
            f"{page}",
            path=path,
        )
    first = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    if not _is_of_the_network(errors, error):
        return ModelLoadError(f"fetching {name} failed: {first}; fetch it again", path=path)
    return ModelLoadError(
        f"{name} is not in the cache{cached}, and the hub at {at} cannot be reached ({first}); "
        "check the network, then try again",
        path=path,
    )


def _is_of_the_network(errors: Any, error: Exception) -> bool:
    """Return whether ``error`` says that the hub was not reached."""
    library = type(error).__module__.partition(".")[0]
    return (
        isinstance(error, (ConnectionError, TimeoutError, errors.LocalEntryNotFoundError))
        or library.startswith(("httpx", "httpcore", "urllib3"))
        or (library == "requests" and "Connect" in type(error).__name__)
    )
