"""Whose code is changed: files, the groups of laws that speak of each, and the rigs that try it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from mutation.loading import Module

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ROOT = Path(__file__).parents[2]
NOT_THE_ENGINE = ("__init__.py", "conformance.py")
"""A rig may only be wrong about itself; what it can hide is judged by the suite."""


@attrs.frozen(kw_only=True)
class Subject:
    """A backend whose code is changed.

    ``files`` are those of ``folder`` that a plugin's author writes, each with the ids of the
    groups of laws that speak of it. ``renamed`` has modules that are imported under another name
    (text is replaced too), so that the oracle stays as it is; ``besides`` has more modules that
    are then needed. ``rigs`` name functions as "module:function", ``entries`` the entry points of
    a backend that is not installed; ``preload`` is imported before processes are forked.
    """

    name: str
    folder: Path
    package: str
    files: Mapping[str, tuple[str, ...]]
    rigs: tuple[str, ...]
    renamed: Mapping[str, str] = attrs.field(factory=dict)
    preload: tuple[str, ...] = ()
    besides: Mapping[str, Path] = attrs.field(factory=dict)
    entries: Mapping[str, Mapping[str, str]] = attrs.field(factory=dict)

    def modules(self) -> dict[str, Module]:
        """Return the subject's modules by the names that they are imported by."""
        found = {}
        for path in sorted(self.folder.rglob("*.py")):
            parts = path.relative_to(self.folder).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join([self.package, *(parts[:-1] if is_package else parts)])
            found[name] = self._module(path, is_package=is_package)
        for name, path in self.besides.items():
            found[name] = self._module(path, is_package=False)
        return found

    def _module(self, path: Path, *, is_package: bool) -> Module:
        return Module(text=self.text(path), file=str(path), is_package=is_package)

    def text(self, path: Path) -> str:
        """Return the text of a file, with the names that its modules are imported by."""
        text = path.read_text(encoding="utf-8")
        for old, new in self.renamed.items():
            text = text.replace(old, new)
        return text

    def module_of(self, file: str) -> str:
        """Return the name that a file's module is imported by."""
        return ".".join([self.package, *Path(file).with_suffix("").parts])


def _author_files(folder: Path, groups: Mapping[str, str], left: tuple[str, ...] = ()) -> Any:
    names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*.py"))]
    kept = [name for name in names if name not in (*NOT_THE_ENGINE, *left)]
    return {name: tuple(groups.get(Path(name).stem, "").split()) for name in kept}


def _reference() -> Subject:
    folder = ROOT / "src" / "infercore" / "testing"
    groups = {
        "attention": "DEC KV", "bert": "ENC EMB", "cells": "KV STATE", "dry": "SAMP",
        "kv_formats": "CAP STATE", "llama": "DEC CAP", "mirostat": "SAMP",
        "products": "THREAD DEC LORA", "reference_base": "EMB CANCEL DEC", "reference_context":
        "DEC KV CANCEL", "reference_encoder": "ENC EMB", "reference_model": "LIFE CAP MEM BAD",
        "reference_sampler": "SAMP", "reference_sequences": "KV STATE", "reference_settings":
        "CAP BAD", "reference_tokenizer": "TOK", "truncation": "SAMP",
    }  # fmt: skip
    return Subject(
        name="reference",
        folder=folder,
        package="infercore_subject",
        # The rest is help for tests: faults, limits, a toy, how a test loads a model.
        files=_author_files(folder, groups, ("faults.py", "limits.py", "toy.py", "reference.py")),
        rigs=("infercore_subject_rig:rig",),
        renamed={
            "infercore.conformance.reference": "infercore_subject_rig",
            "infercore.testing": "infercore_subject",
        },
        besides={
            "infercore_subject_rig": ROOT / "src" / "infercore" / "conformance" / "reference.py"
        },
    )


def _llamacpp() -> Subject:
    folder = ROOT / "plugins" / "llamacpp" / "src" / "infercore_llamacpp"
    groups = {
        "abort": "CANCEL", "adapters": "LORA", "amx": "DEC", "batch": "DEC KV", "capabilities":
        "CAP KV", "child": "LIFE BAD", "context": "DEC CAP LIFE", "decoding": "DEC KV EMB CANCEL",
        "devices": "CAP", "gguf": "LIFE BAD", "header": "LIFE BAD", "library": "LIFE CAP",
        "loading": "LIFE BAD CAP", "log": "BAD LIFE", "memory": "KV STATE", "model": "LIFE CAP",
        "overrides": "CAP BAD", "owned": "LIFE MEM", "payload": "STATE", "plan": "MEM",
        "plugin": "LIFE CAP",
        "release": "CAP", "rope": "CAP DEC", "sampler": "SAMP", "settings": "CAP BAD",
        "soundness": "BAD LIFE", "state": "STATE", "threads": "THREAD", "tokenizer": "TOK",
        "traits": "CAP STATE",
    }  # fmt: skip
    return Subject(
        name="llamacpp",
        folder=folder,
        package="infercore_llamacpp",
        files=_author_files(folder, groups),
        rigs=tuple(
            f"infercore_llamacpp.conformance:{name}"
            for name in ("rig", "recurrent_rig", "sliding_rig")
        ),
        preload=("llama_cpp",),
    )


def _openvino() -> Subject:
    folder = ROOT / "plugins" / "openvino" / "src" / "infercore_openvino"
    groups = {
        "adapters": "LORA", "additions": "DEC CAP LORA", "arithmetic": "CAP BAD",
        "base": "DEC CAP CANCEL", "blocks": "KV", "cache": "CAP STATE", "compiled": "CAP THREAD",
        "cpu": "CAP", "encoder": "ENC EMB", "encoder_graph": "ENC EMB", "engine": "CAP LIFE",
        "facts": "CAP", "files": "LIFE BAD", "graph": "DEC CAP", "limits": "MEM",
        "memory": "MEM", "model": "LIFE CAP BAD", "options": "CAP BAD", "outputs": "DEC EMB",
        "paged": "DEC KV CANCEL", "paged_request": "DEC KV", "pieces": "TOK",
        "plugin": "LIFE CAP", "pool": "KV", "probe": "CAP", "recurrent": "DEC KV STATE",
        "rope": "CAP KV", "settings": "CAP BAD", "state": "STATE", "stateful": "DEC KV",
        "tokenizer": "TOK",
    }  # fmt: skip
    return Subject(
        name="openvino",
        folder=folder,
        package="infercore_openvino",
        files=_author_files(folder, groups),
        rigs=tuple(
            f"infercore_openvino.conformance:{name}"
            for name in ("rig", "stateful_rig", "recurrent_rig")
        ),
        preload=("openvino", "openvino_tokenizers"),
    )


def _example() -> Subject:
    folder = ROOT / "examples" / "third_party_backend" / "src" / "infercore_tablelm"
    groups = {"backend": "DEC KV TOK CAP BAD", "plugin": "LIFE CAP", "tables": "DEC LIFE BAD"}
    return Subject(
        name="example",
        folder=folder,
        package="infercore_tablelm",
        files=_author_files(folder, groups, ("making.py",)),  # which makes tables
        rigs=("infercore_tablelm.conformance:rig",),
        entries={"infercore.backends": {"tablelm": "infercore_tablelm.plugin"}},
    )


SUBJECTS: Mapping[str, Callable[[], Subject]] = {
    "reference": _reference,
    "llamacpp": _llamacpp,
    "openvino": _openvino,
    "example": _example,
}
