"""Files that end the process when an engine loads them as they are, and those it cannot load."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import numpy as np

import infercore as ic
from process.rig import Rig, case, ids, refused

if TYPE_CHECKING:
    from pathlib import Path

LLAMA = ("llamacpp",)
_ALPHABET = [chr(33 + i) for i in range(94)]
_VOCABULARY = [*_ALPHABET, *(f"t{i}" for i in range(30)), "\u0120", "\u010a", "<a>", "<b>"]


def _llama(**changed: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    from llamacpp import random_gguf

    metadata, tensors = random_gguf._llama(np.random.default_rng(0))
    metadata |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": list(_VOCABULARY),
        "tokenizer.ggml.merges": ["t 1"],
    }
    for key, value in changed.items():
        if value is None:
            del metadata[key]
        else:
            metadata[key] = value
    return metadata, tensors


def _load(folder: Path, metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
    from llamacpp import random_gguf

    path = random_gguf.write_file(folder / "odd.gguf", metadata, tensors)
    with ic.load_model(path, backend="llamacpp") as model:
        context = model.new_context(n_ctx=32, n_threads=1, n_threads_batch=1)
        context.decode(ids(4))
        model.tokenizer.encode("hello")
        context.close()


@case("file", on=LLAMA)
def a_vocabulary_with_a_token_twice(rig: Rig) -> None:
    tokens = list(_VOCABULARY)
    tokens[5] = tokens[4]
    metadata, tensors = _llama(**{"tokenizer.ggml.tokens": tokens})
    with refused(ic.ModelFormatError, says="2 times"):
        _load(rig.folder, metadata, tensors)
    _load(rig.folder, *_llama())


@case("file", on=LLAMA)
def a_vocabulary_without_all_bytes(rig: Rig) -> None:
    metadata, tensors = _llama(**{"tokenizer.ggml.model": "llama"})
    with refused(ic.ModelFormatError, says="no token for the byte"):
        _load(rig.folder, metadata, tensors)


@case("file", on=LLAMA)
def numbers_that_no_model_has(rig: Rig) -> None:
    for key, value in (
        ("llama.block_count", 0),
        ("llama.block_count", 2**31),
        ("llama.attention.layer_norm_rms_epsilon", -1.0),
        ("llama.attention.layer_norm_rms_epsilon", float("nan")),
        ("llama.rope.scaling.type", "warp"),
        ("llama.expert_count", 4),
        ("llama.expert_used_count", 4),
        ("llama.attention.head_count", 0),
        ("llama.attention.head_count", 7),
        ("llama.attention.head_count_kv", 3),
        ("llama.context_length", 0),
        ("llama.embedding_length", 63),
        ("llama.rope.dimension_count", 33),
        ("llama.vocab_size", 7),
    ):
        metadata, tensors = _llama(**{key: value})
        try:
            _load(rig.folder, metadata, tensors)
        except (ic.ModelFormatError, ic.InvalidInputError, ic.OutOfMemoryError):
            continue
        assert key in {"llama.vocab_size", "llama.context_length", "llama.rope.dimension_count"}


@case("file", on=LLAMA)
def tensors_of_other_shapes(rig: Rig) -> None:
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.1.ffn_down.weight"):
        for change in (lambda t: t[: len(t) // 2], lambda t: t.reshape(-1), lambda t: t[:, :1]):
            metadata, tensors = _llama()
            tensors[name] = np.ascontiguousarray(change(tensors[name]))
            with refused(ic.ModelFormatError):
                _load(rig.folder, metadata, tensors)
        metadata, tensors = _llama()
        del tensors[name]
        with refused(ic.ModelFormatError):
            _load(rig.folder, metadata, tensors)


@case("file", on=LLAMA)
def a_header_with_flipped_bits(rig: Rig) -> None:
    from llamacpp import random_gguf

    whole = random_gguf.write_file(rig.folder / "whole.gguf", *_llama()).read_bytes()
    path = rig.folder / "flipped.gguf"
    random = np.random.default_rng(1)
    for at in random.integers(0, 1600, 60).tolist():
        data = bytearray(whole)
        data[at] ^= 1 << int(random.integers(8))
        path.write_bytes(data)
        try:
            with ic.load_model(path, backend="llamacpp") as model:
                model.new_context(n_ctx=32, n_threads=1, n_threads_batch=1).close()
        except (ic.ModelLoadError, ic.InvalidInputError, ic.BackendNotFoundError):
            pass


@case("file", on=LLAMA)
def a_file_cut_off_after_loading_without_a_map(rig: Rig) -> None:
    path = rig.folder / "cut.gguf"
    shutil.copy(rig.path, path)
    with ic.load_model(path, backend="llamacpp", use_mmap=False) as model:
        path.write_bytes(b"")
        context = rig.open(model)
        context.decode(ids(8))
        assert np.isfinite(context.logits()).all()
        context.close()


@case("file", on=("openvino",))
def a_graph_that_is_damaged(rig: Rig) -> None:
    target = rig.folder / "damaged"
    random = np.random.default_rng(1)
    graph = "openvino_model.xml"
    for kind in ("flip", "cut", "empty weights", "flip", "flip", "flip"):
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(rig.path, target)
        data = bytearray((target / graph).read_bytes())
        if kind == "flip":
            for at in random.integers(0, len(data), 40).tolist():
                data[at] = 32
            (target / graph).write_bytes(data)
        elif kind == "cut":
            (target / graph).write_bytes(data[: len(data) // 2])
        else:
            (target / "openvino_model.bin").write_bytes(b"")
        with refused(ic.ModelLoadError):
            ic.load_model(target, backend="openvino").new_context(n_ctx=32).close()
