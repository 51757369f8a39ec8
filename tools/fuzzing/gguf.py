"""GGUF files with damage, above all in their headers: a typed error, or a model that runs."""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import infercore as ic
from fuzzing import Wrong
from fuzzing._bytes import damaged, replaced
from fuzzing._forked import loaded
from infercore.registry import default_registry

if TYPE_CHECKING:
    from random import Random

LIMIT_S = 150.0
BATCH = 200
KINDS = (
    "llama", "head16", "mrope", "sliding", "recurrent", "encoder", "rank", "learned",
    "biased", "t5", "spm",
)  # fmt: skip
PACK = (("storyteller", "gguf-q8_0"), ("encoder", "gguf-f32"), ("recurrent", "gguf-f32"))
_HEADER_SHARE = 0.85
_TENSOR = re.compile(
    rb"(?:blk\.\d+\.\w+|output\w*|token_\w+|position_embd|cls\w*)\.(?:weight|bias)"
)
_UNSOUND_SHARE = 0.1
_NEVER_TYPES = (9, 15, 24, 25, 26, 27, 28, 36)
_TYPES = (*range(45), 255, 2**31)


class Gguf:
    """Loads a changed file and evaluates a text with it."""

    def __init__(self) -> None:
        import infercore_models  # noqa: PLC0415

        sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
        from llamacpp import random_gguf  # noqa: PLC0415

        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self._path = folder / "model.gguf"
        files = [random_gguf.write(folder / f"{kind}.gguf", kind) for kind in KINDS]
        files += [infercore_models.path(*model) for model in PACK]
        for file in files:  # what is changed below runs as it is; all is imported by now
            with ic.load_model(file, backend="llamacpp", check_in_child=False) as model:
                use(model)
        self._models = [file.read_bytes() for file in files]
        self._with_bytes = [data for data in self._models if b"<0xFF>" in data]

    def case(self, random: Random) -> str:
        """Change a file, load it, and use what was loaded."""
        data = random.choice(self._models)
        if random.random() < _UNSOUND_SHARE:
            data = random.choice((data, random.choice(self._with_bytes)))
            self._path.write_bytes(unsound(data, random))
            default_registry().get("llamacpp").check_file(str(self._path))
            raise Wrong("reading alone does not refuse it")
        self._path.write_bytes(self._changed(data, random))
        return f"{len(data)} bytes, {loaded('llamacpp', str(self._path), use)}"

    def _changed(self, data: bytes, random: Random) -> bytes:
        names = list(_TENSOR.finditer(data[: 1 << 20]))
        if random.random() < 0.4:
            found = random.choice(names)
            return retyped(data, found.end(), random)
        header = names[-1].end() + 60 if random.random() < _HEADER_SHARE else None
        return damaged(data, random, 4, header)


def unsound(data: bytes, random: Random) -> bytes:
    """Return ``data`` with what ends the engine's process, and no trial is needed to know it."""
    key = b"tokenizer.ggml.token_type\x09\0\0\0"
    number = random.randrange(0xA0, 0x100)
    byte, kinds = data.find(b"<0x%02X>" % number), data.find(key)
    places = [(byte, random.choice((b"<0xG", b"<0x%02x" % number)))] * (byte > 0)
    places += [(kinds + len(key) + 12 + 4 * random.randrange(3), b"\6\0\0\0")] * (kinds > 0)
    if places and random.random() < 0.7:
        at, piece = random.choice(places)
    else:
        at = random.choice(list(_TENSOR.finditer(data[: 1 << 20]))).end()
        at += 4 + 8 * int.from_bytes(data[at : at + 4], "little")
        piece = random.choice(_NEVER_TYPES).to_bytes(4, "little")
    return replaced(data, at, piece)


def retyped(data: bytes, at: int, random: Random) -> bytes:
    """Return ``data`` with another type, size or place of the tensor whose name ends at ``at``."""
    n_dims = int.from_bytes(data[at : at + 4], "little")
    where = {
        "type": (at + 4 + 8 * n_dims, 4, random.choice(_TYPES)),
        "size": (
            at + 4 + 8 * random.randrange(max(1, n_dims)),
            8,
            random.choice((0, 1, 63, 2**40)),
        ),
        "place": (at + 8 + 8 * n_dims, 8, 32 * random.randrange(1000)),
    }
    start, size, value = where[random.choice(("type", "type", "type", "size", "place"))]
    return replaced(data, start, value.to_bytes(size, "little"))


def use(model: ic.Model) -> None:
    """Evaluate some tokens, alone and together, and read what came out."""
    with contextlib.suppress(ic.UnsupportedFeatureError):
        model.tokenizer.decode(model.tokenizer.encode("Once upon a time \u00e9\n\t\U0001f600"))
    with model.new_context(n_ctx=64, n_batch=16, n_threads=1, n_threads_batch=1) as context:
        tokens = [(11 * i + 3) % model.tokenizer.n_vocab for i in range(40)]
        if model.info.has_encoder:
            context.encode(tokens[:16])
            if not model.capabilities.logits_all:
                return
        context.decode(tokens)
        context.decode_one(tokens[0])
        np.asarray(context.logits()).sum()
        context.seq_remove(0)
        context.decode(tokens[:5])


def open_target() -> Gguf:
    """Return the target."""
    return Gguf()
