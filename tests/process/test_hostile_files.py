"""Model files over which llama.cpp ends the process; here each is a typed error, or works.

Without a trial: what is seen in their headers is enough. One process loads them all, so that a
death shows, and which file it was: the one that it printed last.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import numpy as np
import pytest

import pack
from llamacpp import random_gguf

CHILD = """
    import sys
    import infercore as ic

    for path in sys.argv[1:]:
        print(end=path + " ", flush=True)
        try:
            with ic.load_model(path, backend="llamacpp", check_in_child=False) as model:
                with model.new_context(n_ctx=32, n_threads=1, n_threads_batch=1) as context:
                    context.decode([5, 12, 19, 26])
                model.tokenizer.encode("hello")
        except (ic.ModelFormatError, ic.InvalidInputError, ic.OutOfMemoryError) as error:
            print(type(error).__name__, flush=True)
        else:
            print("works", flush=True)
"""
VOCABULARY = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [
        *(chr(33 + i) for i in range(94)),
        *(f"t{i}" for i in range(30)),
        "\u0120", "\u010a", "<a>", "<b>",
    ],
    "tokenizer.ggml.merges": ["t 1"],
}  # fmt: skip


@pytest.fixture
def outcomes():
    """Return a function that loads files in another process and tells what came of each."""
    pack.need_backend("llamacpp")

    def outcomes(paths):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(CHILD), *map(str, paths)],
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (done.returncode, done.stdout[-500:], done.stderr[-1500:])
        found = [line.rsplit(" ", 1)[1] for line in done.stdout.splitlines()]
        return dict(zip(paths, found, strict=True))

    return outcomes


def model():
    metadata, tensors = random_gguf._llama(np.random.default_rng(0))
    return {**metadata, **VOCABULARY}, tensors


def test_numbers_that_no_model_has(outcomes, tmp_path):
    files = {}
    for i, (key, value) in enumerate((
        ("llama.block_count", 2),
        ("llama.block_count", 2**31),
        ("llama.attention.layer_norm_rms_epsilon", float("nan")),
        ("llama.attention.head_count", 0),
        ("llama.attention.head_count", 7),
        ("llama.attention.head_count_kv", 3),
        ("llama.context_length", 0),
        ("llama.embedding_length", 63),
        ("llama.rope.dimension_count", 33),
        ("llama.vocab_size", 7),
    )):  # fmt: skip
        metadata, tensors = model()
        path = random_gguf.write_file(tmp_path / f"{i}.gguf", {**metadata, key: value}, tensors)
        files[path] = f"{key}={value}"
    found = outcomes(files)
    works = [name for path, name in files.items() if found[path] == "works"]
    assert works[0] == "llama.block_count=2"
    harmless = {"llama.vocab_size", "llama.context_length", "llama.rope.dimension_count"}
    assert {name.split("=")[0] for name in works[1:]} <= harmless


def test_tensors_of_other_shapes(outcomes, tmp_path):
    changes = {
        "half": lambda t: t[: len(t) // 2],
        "flat": lambda t: t.reshape(-1),
        "column": lambda t: t[:, :1],
    }
    paths = []
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.1.ffn_down.weight"):
        for change, changed in changes.items():
            metadata, tensors = model()
            tensors[name] = np.ascontiguousarray(changed(tensors[name]))
            path = tmp_path / f"{name}-{change}.gguf"
            paths.append(random_gguf.write_file(path, metadata, tensors))
        metadata, tensors = model()
        del tensors[name]
        path = tmp_path / f"{name}-none.gguf"
        paths.append(random_gguf.write_file(path, metadata, tensors))
    assert set(outcomes(paths).values()) == {"ModelFormatError"}


def test_a_header_with_flipped_bits(outcomes, tmp_path):
    whole = random_gguf.write_file(tmp_path / "whole.gguf", *model()).read_bytes()
    random = np.random.default_rng(1)
    paths = []
    for i, at in enumerate(random.integers(0, 1600, 60).tolist()):
        data = bytearray(whole)
        data[at] ^= 1 << int(random.integers(8))
        paths.append(tmp_path / f"{i}.gguf")
        paths[-1].write_bytes(data)
    assert set(outcomes(paths).values()) <= {"works", "ModelFormatError", "InvalidInputError"}
