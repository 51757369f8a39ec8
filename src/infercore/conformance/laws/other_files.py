"""Other files than the rig's own, made of them: in parts, and with other rope."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.conformance import gguf_copy, safetensors_copy
from infercore.conformance.expect import equal, foreseen, raises, that
from infercore.conformance.gguf_copy import FLOAT32, UINT32, number
from infercore.conformance.law import law
from infercore.conformance.laws.edges import OF_ROPE
from infercore.conformance.laws.headers import bytes_of, is_gguf, loaded
from infercore.errors import (
    ModelLoadError,
    UnsupportedFeatureError,
)

if TYPE_CHECKING:
    from infercore.conformance.rig import Rig

_MAX_BYTES = 2**28


def own_file(rig: Rig) -> gguf_copy.Gguf:
    """Return the rig's model in pieces. Raises `NotApplicable` where it is no small GGUF file."""
    if rig.path is None or not is_gguf(Path(rig.path)):
        rig.leave("the model is no GGUF file")
    if Path(rig.path).stat().st_size > _MAX_BYTES:
        rig.leave(f"the model has more than {_MAX_BYTES >> 20} MiB, too much to copy")
    return gguf_copy.read(Path(rig.path))


@law("CAP-43", since="1.2")
def check_a_model_in_parts(rig: Rig) -> None:
    """A model in several files is the same model as in one, and is planned as that, or is refused.

    A part that is missing or damaged is refused.
    """
    path = Path(rig.path) if rig.path is not None else rig.leave("the rig names no path")
    if (path / "model.safetensors").is_file():
        _check_shards(rig, path)
        return
    own = own_file(rig)
    parts = own.parts(3)
    with tempfile.TemporaryDirectory() as folder:
        bare = Path(folder) / "bare.gguf"  # which says not what its tensors say
        bare.write_bytes(own.other(general__file_type=None).to_bytes())
        with loaded(rig, str(bare)) as model:
            _check_same(rig, model)
        files = [Path(folder) / f"a-b-{i + 1:05d}-of-00003.gguf" for i in range(3)]
        for file, part in zip(files, parts, strict=True):
            file.write_bytes(part.to_bytes())
        with loaded(rig, str(files[0])) as model:
            _check_same(rig, model)
            digest = model.digest
        for i, (file, part) in enumerate(zip(files, parts, strict=True), 1):
            data = part.to_bytes()
            file.write_bytes(_flipped(data, part.tensors[-1][1]))
            with loaded(rig, str(files[0])) as model:
                that(model.digest != digest, f"a flipped bit in part {i}: the same digest")
            for what, wrong in _wrong_parts(part).items():
                file.write_bytes(wrong)
                must_be_refused(rig, files[0], f"with part {i} {what}")
            file.write_bytes(data)
        files[1].unlink()
        error = must_be_refused(rig, files[0], "without its second part")
        is_named = files[1].name in f"{error} {error.path}"
        that(is_named, f"the refusal without {files[1].name} does not name it: {error}")


def _check_same(rig: Rig, model: Any) -> None:
    tokens, found, own = rig.tokens(9), model.info, rig.model.info
    equal((found.n_params, found.size_bytes), (own.n_params, own.size_bytes), "sizes")
    equal(model.tokenizer.n_vocab, own.n_vocab, "n_vocab")
    with model.new_context(**rig.fields()) as context:
        context.decode(tokens)
        rig.near(context.logits(), rig.cold(tokens), "logits of a model in parts")
        equal(context.tolerance, rig.context().tolerance, "the tolerance of a model in parts")
    with contextlib.suppress(UnsupportedFeatureError):
        plans = [m.plan_memory(**rig.fields()) for m in (model, rig.model)]
        equal(plans[0], plans[1], "the plan of a model in parts")


def _check_shards(rig: Rig, path: Path) -> None:
    """The same of a folder whose weights lie in several files, beside an index of them."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / path.name
        shutil.copytree(path, folder)
        whole = folder / "model.safetensors"
        tensors = safetensors_copy.read(whole)
        names, weight_map = sorted(tensors), {}
        for i in range(2):
            shard = f"model-{i + 1:05d}-of-00002.safetensors"
            safetensors_copy.write(folder / shard, {name: tensors[name] for name in names[i::2]})
            weight_map.update(dict.fromkeys(names[i::2], shard))
        whole.unlink()
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        try:
            opened = loaded(rig, str(folder))
        except ModelLoadError as error:
            foreseen(error, "weights in two files")
            return
        with opened as model:
            _check_same(rig, model)


_FACTOR, _TRAINED = 4.0, 64
_STATED: dict[str, dict[str, bytes]] = {
    "linear": {},
    "yarn": {"original_context_length": number(UINT32, _TRAINED)},
}


@law("CAP-45", since="1.2")
def check_rope_that_files_state(rig: Rig) -> None:
    """Scaling of rope that a file states is told, and computes what it does where it is asked for.

    What is asked for goes before it. A file with scaling that is not known is refused.
    """
    path = Path(rig.path) if rig.path is not None else rig.leave("the rig names no path")
    tokens, is_folder = rig.tokens(100), (path / "model.safetensors").is_file()
    if is_folder and bytes_of(path) > _MAX_BYTES:
        rig.leave(f"the model has more than {_MAX_BYTES >> 20} MiB, too much to copy")
    if rig.model.info.sliding_window or rig.context().effective.get("rope_freq_base") is None:
        rig.leave("effective tells no rope_freq_base, or layers differ in their rope")
    for kind, stated in _STATED.items():
        asked: dict[str, Any] = {"rope_scaling_type": kind, "rope_freq_scale": 1 / _FACTOR}
        if "original_context_length" in stated:
            asked["yarn_orig_ctx"] = _TRAINED
        with tempfile.TemporaryDirectory() as folder:
            scaled = Path(folder) / "scaled"
            if is_folder:
                _scale_config(path, scaled, kind)
            else:
                scaled.write_bytes(_scaled(own_file(rig), rig, kind, stated).to_bytes())
            try:
                opened = loaded(rig, str(scaled))
            except ModelLoadError as error:
                foreseen(error, f"a file with {kind} scaling")
                continue
            with opened as model:
                _check_rope(rig, model, asked, tokens)
                _check_moves(rig, model, f"{kind} that a file states")
    if not is_folder:
        _check_factor(rig)


def _check_factor(rig: Rig) -> None:
    """Where a file scales the scores of attention by a factor, moves leave that as it is."""
    name = f"{rig.model.info.architecture}__rope__scaling__attn_factor"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scaled"
        file.write_bytes(own_file(rig).other(**{name: number(FLOAT32, 1.5)}).to_bytes())
        try:
            opened = loaded(rig, str(file))
        except ModelLoadError as error:
            foreseen(error, "a file with a factor of attention")
            return
        with opened as model:
            _check_moves(rig, model, "a factor of attention that a file states")


def _check_moves(rig: Rig, model: Any, what: str) -> None:
    """Tokens that are moved up and back, if they can be, are what they were."""
    tokens = rig.tokens(20)
    with model.new_context(**rig.fields()) as one, model.new_context(**rig.fields()) as other:
        if not one.capabilities.kv_shift:
            return
        for context in (one, other):
            context.decode(tokens[:18])
        one.seq_shift(0, 0, -1, 4)
        one.decode_one(tokens[18])
        one.seq_remove(0, 22, -1)
        one.seq_shift(0, 0, -1, -4)
        for context in (one, other):
            context.decode(tokens[18:])
        rig.near(one.logits(), np.array(other.logits()), f"moved up and back, with {what}")


def _scaled(own: gguf_copy.Gguf, rig: Rig, kind: str, stated: dict[str, bytes]) -> gguf_copy.Gguf:
    names = {"type": gguf_copy.text(kind), "factor": number(FLOAT32, _FACTOR), **stated}
    prefix = f"{rig.model.info.architecture}__rope__scaling__"
    return own.other(**{prefix + name: value for name, value in names.items()})


def _scale_config(path: Path, folder: Path, kind: str) -> None:
    shutil.copytree(path, folder)
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    name = "rope_parameters" if "rope_parameters" in config else "rope_scaling"
    told = {"rope_type": kind, "factor": _FACTOR, "original_max_position_embeddings": _TRAINED}
    config[name] = {**(config.get(name) or {}), **told}
    file.chmod(0o600)
    file.write_text(json.dumps(config), encoding="utf-8")


def _check_rope(rig: Rig, model: Any, asked: dict[str, Any], tokens: list[int]) -> None:
    plain = {"rope_scaling_type": "none"}
    for what, given, other in (("stated", {}, asked), ("undone", plain, plain)):
        with (
            contextlib.suppress(UnsupportedFeatureError),
            model.new_context(**rig.fields(**given)) as one,
        ):
            one.decode(tokens)
            found = np.array(one.logits())
            if what == "stated":
                gap = float(np.abs(found - rig.cold(tokens)).max())
                that(gap > rig.tolerance, f"what a file states changes nothing: {asked}")
            context = rig.context(**other)
            for name in OF_ROPE if what == "stated" else OF_ROPE[:3]:
                told = one.effective.get(name), context.effective.get(name)
                equal(told[0], told[1], f"{name} of rope that is {what}: {asked}")
            context.decode(tokens)
            rig.near(found, np.array(context.logits()), f"rope that is {what}: {asked}")


def _flipped(data: bytes, weights: bytes) -> bytes:
    """Return ``data`` with a bit of ``weights`` flipped, which stand in it."""
    at = data.rindex(weights)
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def _wrong_parts(part: gguf_copy.Gguf) -> dict[str, bytes]:
    data, tensor = part.to_bytes(), part.tensors[0][0]
    at = data.index(tensor.name.encode()) + len(tensor.name) + 4 + 8 * len(tensor.dims)
    no_kind = (99).to_bytes(4, "little")
    return {
        "that is empty": b"",
        "that is cut": data[: len(data) // 2],
        "of a type that there is not": data[:at] + no_kind + data[at + 4 :],
    }


def must_be_refused(rig: Rig, file: Path, what: str) -> ModelLoadError:
    """Return the error that a file is refused with, which names its folder."""
    error = raises(ModelLoadError, lambda: loaded(rig, str(file)).close(), what)
    foreseen(error, what)
    that(str(file.parent) in str(error.path), f"{what}: the path of the error is {error.path!r}")
    return error
