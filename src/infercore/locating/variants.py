"""Which models the files of a repository are, and which of them a name means."""

from __future__ import annotations

import posixpath
import re
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

IR_NAME, IR_WEIGHTS = "openvino_model.xml", "openvino_model.bin"
PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q5_K_M", "Q8_0", "F16", "BF16", "F32")
"""Of several quantizations the first of these is taken where none is named."""

_SPLIT = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf", re.IGNORECASE)
_QUANT = re.compile(
    r"(?:^|[-._/])(?P<label>(?:UD-)?(?:I?Q\d\w*|TQ\d_\d|MXFP4\w*|BF16|F16|F32))$", re.IGNORECASE
)
_NO_MODEL = re.compile(r"(?:^|[-._/])(?:mmproj|imatrix)", re.IGNORECASE)
_BESIDE_AN_IR = re.compile(r"openvino_.*|.*\.(?:json|txt|jinja|model)|tokenizer.*")


@attrs.frozen(kw_only=True)
class Variant:
    """One model of a repository. ``main`` is what is loaded, the last of ``files`` to fetch."""

    kind: str
    label: str
    main: str
    files: tuple[str, ...]

    @property
    def path(self) -> str:
        """What a backend is given: the first file of a GGUF, the folder of an IR."""
        return posixpath.dirname(self.main) if self.kind == "openvino" else self.main

    def is_called(self, name: str) -> bool:
        """Return whether ``name`` means this one: its label, one of its files, its folder."""
        return (
            name.lower() == self.label.lower() or name in self.files or name == (self.path or ".")
        )


def variants(files: Iterable[str]) -> list[Variant]:
    """Return the models among ``files``, by label; a split GGUF that lacks a part is none."""
    names = sorted(files)
    return sorted([*_ggufs(names), *_irs(names)], key=lambda found: (found.label, found.main))


def _ggufs(names: Sequence[str]) -> Iterable[Variant]:
    sets: dict[str, list[str]] = {}
    for name in names:
        if name.lower().endswith(".gguf") and not _NO_MODEL.search(posixpath.basename(name)):
            split = _SPLIT.fullmatch(name)
            key = f"{split['stem']} {split['parts']}" if split else name
            sets.setdefault(key, []).append(name)
    for parts in sets.values():
        split = _SPLIT.fullmatch(parts[0])
        if split and len(parts) != int(split["parts"]):
            continue
        stem = split["stem"] if split else parts[0][: -len(".gguf")]
        named = _QUANT.search(stem)
        yield Variant(
            kind="gguf",
            label=named["label"] if named else posixpath.basename(stem),
            main=parts[0],
            files=(*parts[1:], parts[0]),
        )


def _irs(names: Sequence[str]) -> Iterable[Variant]:
    folders: dict[str, list[str]] = {}
    for name in names:
        folder, base = posixpath.split(name)
        folders.setdefault(folder, []).append(base)
    for folder, bases in folders.items():
        if not {IR_NAME, IR_WEIGHTS} <= set(bases):
            continue
        beside = [base for base in bases if base != IR_NAME and _BESIDE_AN_IR.fullmatch(base)]
        files = [posixpath.join(folder, base) for base in (*beside, IR_NAME)]
        label = posixpath.basename(folder) or "openvino"
        yield Variant(kind="openvino", label=label, main=files[-1], files=tuple(files))


def chosen(found: Sequence[Variant], wanted: str | None, kinds: Sequence[str]) -> list[Variant]:
    """Return those of ``found`` that ``wanted`` may mean: one where it is clear.

    Without ``wanted`` the kinds that are read here, ``kinds``, go first, then `PREFERRED`.
    """
    if wanted is not None:
        return [each for each in found if each.is_called(wanted)]
    readable = [each for each in found if each.kind in kinds] or list(found)
    for label in PREFERRED:
        named = [each for each in readable if each.label.upper() == label]
        if named:
            return named
    return readable
