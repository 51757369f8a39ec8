"""Models of the hub, through `huggingface_hub`: its cache, its tokens, its way to be offline."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
from typing import TYPE_CHECKING, Any

import attrs

from infercore.errors import (
    InferCoreError,
    InvalidInputError,
    ModelLoadError,
    ModelNotFoundError,
    UnsupportedFeatureError,
)
from infercore.locating import listing, transfer
from infercore.locating.variants import Variant, chosen, variants
from infercore.values import checks, install

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_NO_ROOM = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG)
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
        if library.constants.HF_HUB_OFFLINE:  # versions before 1 look when they connect, if at all
            raise library.errors.OfflineModeIsEnabled
        revision, siblings = _listed(library, name)
        variant = _one(name, variants(siblings), kinds, siblings)
        _refuse_alike(name, variant, siblings)
        paths = {file: _download(library, name, siblings[file], revision) for file in variant.files}
        transfer.mark_as_main(library, name.repo, revision)
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


def _listed(library: Any, name: HubName) -> tuple[str, dict[str, listing.Sibling]]:
    """Return the newest revision and its files.

    Raises `ModelLoadError` for an answer that is none of a hub.
    """
    try:
        return listing.listed(library, name.repo)
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


def _refuse_alike(name: HubName, variant: Variant, files: Iterable[str]) -> None:
    """Raise `ModelLoadError` where a disk may take a file of the model for another one."""
    if found := listing.alike(files, variant.files):
        raise ModelLoadError(
            f"{name.repo} has files whose names differ by large and small letters alone "
            f"({found[0]}); download the one that you want yourself, and give its path",
            path=str(name),
        )


def _holds_none(files: Mapping[str, Any]) -> str:
    if any(file.lower().endswith(_WEIGHTS) for file in files):
        return (
            "contains weights that must be converted first; look for a repository with GGUF or "
            f"OpenVINO files of it, or see {install.GET_A_MODEL}"
        )
    return "contains no GGUF file and no openvino_model.xml with its weights"


def _download(library: Any, name: HubName, sibling: listing.Sibling, revision: str) -> str:
    """Return the path of a file in the cache, fetched and compared if it was not there."""
    path = transfer.download(library, name.repo, sibling, revision)
    if path is None:
        raise ModelLoadError(
            f"{sibling.name} of {name.repo} was damaged on the way (its checksum is not the hub's) "
            "and was deleted; fetch it again",
            path=str(name),
        )
    return path


# -- errors ----------------------------------------------------------------------------------------


def _library() -> Any:
    try:
        library = importlib.import_module("huggingface_hub")
        for part in ("constants", "errors", "file_download", "utils"):
            importlib.import_module(f"huggingface_hub.{part}")
        importlib.import_module("huggingface_hub.file_download").http_get  # noqa: B018  (it is no public name)
    except (AttributeError, ImportError) as error:
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
    if getattr(error, "errno", None) in _NO_ROOM:
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
