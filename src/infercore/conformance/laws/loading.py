"""Loading: what is told meanwhile, what is refused, and what belongs to a model's identity."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import infercore
from infercore.conformance.expect import equal, foreseen, raises, that
from infercore.conformance.law import law
from infercore.conformance.laws.bad_input import OPTIONS
from infercore.conformance.laws.engines import check_releases
from infercore.conformance.rig import THREADS
from infercore.errors import (
    InferCoreError,
    InvalidInputError,
    ModelLoadError,
    PluginError,
    UnsupportedFeatureError,
)
from infercore.registry import default_registry
from infercore.testing import load_reference_model, reference_backend
from infercore.values.config import KV_TYPES, ModelConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from infercore.conformance.rig import Rig

SMALL = 2**20
"""Bytes of a file that holds no weights."""

_MODEL_OPTIONS: tuple[dict[str, Any], ...] = (
    {"n_gpu_layers": 20}, {"split_mode": "row"}, {"main_gpu": 5}, {"tensor_split": (0.5, 0.5)},
    {"device": "NO_SUCH_DEVICE:7"}, {"use_mmap": True}, {"use_mmap": False}, {"use_mlock": True},
    {"check_tensors": True},
)  # fmt: skip
_CONTEXT_OPTIONS: dict[str, tuple[Any, ...]] = {
    **OPTIONS,
    "type_k": KV_TYPES,
    "type_v": KV_TYPES,
    "n_threads": (1, 2, 480),
    "rope_freq_scale": (0.5,),
    "precision": ("fast", "default", "accurate"),
}
_OF_ENCODERS: dict[str, tuple[Any, ...]] = {
    "attention_type": ("causal",), "embeddings": (False,), "type_k": ("f16",),
}  # fmt: skip
_BREAKERS: tuple[tuple[str, ...], ...] = (("the ",), ("", ":"), (":", "a" * 50))


def _load(rig: Rig, path: str, **fields: Any) -> Any:
    """Load a model as users do, by the name of the backend."""
    if rig.backend == "reference":
        return load_reference_model(path, config=ModelConfig(**fields))
    if rig.backend not in {backend.name for backend in infercore.backends()}:
        rig.leave("the backend is not announced, so users cannot load with it by name")
    return infercore.load_model(path, backend=rig.backend, **fields)


def _path(rig: Rig) -> str:
    if rig.path is None:
        rig.leave("the rig names no path")
    return rig.path


@law("CAP-30", model="any", since="1.2")
def check_progress(rig: Rig) -> None:
    """Progress gets rising fractions from 0 to 1; False ends the load; its errors come through.

    A Ctrl-C that comes there does, too.
    """
    path, heard = _path(rig), list[float]()
    _load(rig, path, progress=heard.append).close()
    equal((heard[:1], heard[-1:]), ([0.0], [1.0]), "the first and the last fraction")
    equal(heard, sorted(set(heard)), "the fractions, each once")
    for at in (0.0, 0.5):
        enough = partial(_is_below, at)
        raises(ModelLoadError, partial(_load, rig, path, progress=enough), f"a cancel at {at}")

    def fail(fraction: float) -> None:
        raise ZeroDivisionError(fraction)

    def fail_later(fraction: float) -> None:
        if fraction:
            raise ZeroDivisionError(fraction)

    for wrong in (fail, fail_later):
        raises(ZeroDivisionError, partial(_load, rig, path, progress=wrong), "an error of progress")

    def end(fraction: float) -> None:
        if fraction:
            raise KeyboardInterrupt(fraction)

    raises(KeyboardInterrupt, partial(_load, rig, path, progress=end), "a Ctrl-C in progress")
    _load(rig, path).close()


@law("CAP-42", model="any", since="1.2")
def check_what_is_claimed(rig: Rig) -> None:
    """A backend claims the models that it reads, and no empty folder, text, or config alone.

    It works with the releases of its engine (`Rig.engine`) that its package requires, and no other.
    """
    records = {record.name: record.descriptor for record in default_registry().records()}
    found = reference_backend() if rig.backend == "reference" else records.get(rig.backend)
    if found is None:
        rig.leave("the backend is not announced, so nobody asks it what it reads")
    that(found.summary and found.formats, f"it does not say what it reads: {found}")
    narrow = None if callable(rig.narrow) else rig.narrow
    own = [str(path) for path in (rig.path, rig.encoder, narrow) if path is not None]
    for path in own:
        that(found.match(path) > 0, f"a model of its own, {Path(path).name}, is not claimed")
    with tempfile.TemporaryDirectory() as folder:
        names = ("empty", "config alone", "text.txt", "nothing")
        others = [Path(folder) / name for name in names]
        for other in others[:2]:
            other.mkdir()
        for name in ("config.json", "tokenizer.json"):
            settings = [Path(path) / name for path in own if (Path(path) / name).is_file()]
            text = settings[0].read_bytes() if settings else b"{}"
            (others[1] / name).write_bytes(text)
        others[2].write_text("GG and some words more, which are not a model\n", encoding="utf-8")
        others[3].touch()
        for other in others:
            equal(found.match(str(other)), 0.0, f"the score of {other.name}")
    if rig.engine is not None:
        check_releases(rig, rig.engine)


def _is_below(at: float, fraction: float) -> bool:
    return fraction < at


@law("BAD-16", since="1.2")
def check_what_refusals_say(rig: Rig) -> None:
    """A refused option is named, with its value, the backend, and what to do instead.

    Those of models, contexts, encoders and samplers.
    """
    path = _path(rig)
    for fields in _MODEL_OPTIONS:
        _refusal(rig, fields, lambda fields=fields: _load(rig, path, **fields))
    for name, values in _CONTEXT_OPTIONS.items():
        for value in values:
            fields = {"n_ctx": 64, name: value}
            _refusal(rig, {name: value}, partial(rig.model.new_context, **fields))
    for n in (1, 2):
        threads = {"n_threads": n, "n_threads_batch": 3 - n}
        _refusal(rig, threads, partial(_in_force, rig, threads))
    if rig.model.capabilities.native_sampler:
        native = partial(rig.model.new_sampler, implementation="native", dry_multiplier=1.0)
        n_vocab = rig.tokenizer.n_vocab
        options: list[dict[str, Any]] = [{"dry_sequence_breakers": texts} for texts in _BREAKERS]
        options += [{"penalty_last_n": n, "repeat_penalty": 1.5} for n in (2**20, 2**24)]
        options += [{"dry_penalty_last_n": 2**24}]
        options += [{"logit_bias": {token: 1.0}} for token in (n_vocab - 1, n_vocab)]
        options += [{"logit_bias": {0: amount}} for amount in (3e38, 1e39)]
        for asked in options:
            _refusal(rig, asked, partial(native, **asked))
        context, token = rig.context(), rig.tokens(1)[0]
        context.decode(rig.tokens(3))
        with contextlib.suppress(InvalidInputError, UnsupportedFeatureError):
            sampler = rig.opened(native(logit_bias={token: 1e39}))
            equal(sampler.sample(context), token, "the token of the largest bias")
        with contextlib.suppress(InvalidInputError, UnsupportedFeatureError):
            fields = {"temperature": 0, "presence_penalty": 1e6, "penalty_last_n": 2**32}
            sampler = rig.opened(native(**fields))
            sampler.observe([said := sampler.sample(context)])
            that(sampler.sample(context) != said, "a penalty with a window of 2**32 does nothing")
    if rig.encoder is not None and not rig.is_encoder:
        _check_refusals_of_encoders(rig)


def _check_refusals_of_encoders(rig: Rig) -> None:
    beyond = {"n_ctx": (rig.encoder_model.info.n_ctx_train + 1,)}
    for name, values in {**_OF_ENCODERS, **beyond}.items():
        for value in values:
            opened = partial(rig.encoder_model.new_context, **{name: value})
            _refusal(rig, {name: value}, opened)


def _in_force(rig: Rig, fields: dict[str, Any]) -> Any:
    """Return a context that has the fields all together."""
    context = rig.opened(rig.model.new_context(n_ctx=64, **fields))
    told = {name: context.effective.get(name, value) for name, value in fields.items()}
    equal(told, fields, "what is in force")
    return context


def _refusal(rig: Rig, fields: dict[str, Any], opened: Any) -> None:
    """Raise `LawError` where a refusal lacks its facts; it is of the first field."""
    name, value = next(iter(fields.items()))
    try:
        opened().close()
    except UnsupportedFeatureError as error:
        named = error.feature.split("=")[0]  # n_threads stands for n_threads_batch, too
        is_named = bool(named) and (name in error.feature or named in name)
        that(is_named, f"{fields} is refused as {error.feature!r}")
        equal(error.backend, rig.backend, f"the backend that refuses {fields}")
        that(error.hint, f"the refusal of {fields} says nothing to do: {error}")
    except InvalidInputError as error:
        that(error.field, f"the refusal of {fields} names no field: {error}")
        if error.field == name:
            parts = (*value, *value.values()) if isinstance(value, dict) else ()
            is_it = error.value == value or error.value in parts
            that(is_it, f"the refusal of {fields} is of {error.value!r}")
        that(error.allowed not in (None, ""), f"the refusal of {fields} says not what is allowed")
    except infercore.BackendUnavailableError as error:
        that(error.reason, f"the refusal of {fields} has no reason")


@law("BAD-17", model="any", since="1.2")
def check_damaged_files(rig: Rig) -> None:
    """A model with a file missing, cut, empty or of noise raises a typed error, or works.

    Never by a mistake of the plugin's own, such as a KeyError; the refusal names the path. Where
    files of weights lack bytes it computes what the whole ones give; no template is passed over.
    """
    if not rig.is_encoder:
        _check_damages(rig, Path(_path(rig)), rig.model, _logits)
    if rig.is_encoder or rig.encoder is not None:
        path = Path(_path(rig) if rig.encoder is None else rig.encoder)
        _check_damages(rig, path, rig.encoder_model, _vector)


def _check_damages(rig: Rig, path: Path, whole: Any, computed: Callable[[Rig, Any], Any]) -> None:
    expected, template = computed(rig, whole), whole.tokenizer.chat_template
    for what, name, content in _damages(path):
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / path.name
            if path.is_dir():
                shutil.copytree(path, copy)
            file = copy / name if name else copy
            if content is None:
                file.unlink()
            else:
                file.unlink(missing_ok=True)
                file.write_bytes(content)
            try:
                with rig.open_at(str(copy)) as model:
                    found = computed(rig, model)
                    if what in _LACKING:
                        rig.near(found, expected, f"what is computed with {name} {what}")
                    elif what == _NO_TEXT:
                        told = model.tokenizer.chat_template
                        equal(told, template, f"the template with {name} {what}")
                    if model.info.n_ctx_train <= _MOST_TRAINED:
                        with contextlib.suppress(InvalidInputError, UnsupportedFeatureError):
                            trained = rig.opened(model.new_context(n_ctx=0))
                            that(trained.n_ctx > 0, f"{name} {what}: a window of no tokens")
                            trained.close()
            except InferCoreError as error:
                that(not isinstance(error, PluginError), f"{name} {what}: {error}")
                foreseen(error, f"{name} {what}")
                if isinstance(error, ModelLoadError):
                    that(str(copy) in str(error.path), f"{name} {what}: the path {error.path!r}")


def _logits(rig: Rig, model: Any) -> Any:
    """Return the logits behind a few tokens."""
    with model.new_context(**rig.fields()) as context:
        context.decode(_FEW)
        return np.array(context.logits())


def _vector(rig: Rig, model: Any) -> Any:
    """Return an encoder's vector of a few tokens."""
    threads = {name: rig.exact[name] for name in THREADS if name in rig.exact}
    with model.new_context(pooling_type=rig.encoder_pooling(), **threads) as context:
        context.encode(_FEW)
        return np.array(context.embedding())


_FEW = (5, 9, 14, 27)
"""Token ids that each vocabulary has."""
_MOST_TRAINED = 8192
"""Tokens of a trained window that is opened whole, for each damaged file."""
_LACKING = ("without its last byte", "without its middle")
_NO_TEXT = "of bytes that are no text"


def _damages(path: Path) -> Iterator[tuple[str, str, bytes | None]]:
    """Yield what is done to which file of a model, and what is in it then; None = it is gone."""
    if path.is_file():
        data = path.read_bytes()
        for share in (0.001, 0.02, 0.5, 0.999):
            yield f"cut at {share}", "", data[: int(share * len(data))]
        yield "of noise", "", bytes(range(256)) * 64
        if path.suffix == ".json":
            yield from _other_json("", data)
        return
    for file in sorted(path.rglob("*")):
        if not file.is_file() or file.suffix in (".md", ".txt"):
            continue
        name = str(file.relative_to(path))
        yield "gone", name, None
        if file.stat().st_size <= SMALL:
            data = file.read_bytes()
            yield "cut", name, data[: len(data) // 2]
            if file.suffix == ".json":
                yield from _other_json(name, data)
            if file.suffix in (".json", ".jinja"):
                yield _NO_TEXT, name, b"\xff".join((data[:9], data[9:]))
        else:
            with file.open("rb") as opened:
                yield "cut", name, opened.read(SMALL)
            data = file.read_bytes()
            if b"layers.1." in data[:SMALL]:
                yield "with other names", name, data.replace(b"layers.1.", b"layers.9.")
    yield from _shorter(path)


def _shorter(path: Path) -> Iterator[tuple[str, str, bytes]]:
    """Yield the two largest files of a folder, without some of their bytes."""
    for file in sorted(filter(Path.is_file, path.rglob("*")), key=_size)[-2:]:
        name, data = str(file.relative_to(path)), file.read_bytes()
        third = len(data) // 3
        yield _LACKING[0], name, data[:-1]
        yield _LACKING[1], name, data[:third] + data[2 * third :]


def _size(file: Path) -> int:
    return file.stat().st_size


def _other_json(name: str, data: bytes) -> Iterator[tuple[str, str, bytes]]:
    yield "without what is in it", name, b"{}"
    yield "a list", name, b"[]"
    yield from _halves(name, data)


def _halves(name: str, data: bytes) -> Iterator[tuple[str, str, bytes]]:
    """Yield a JSON object with the first, and with the second half of its keys alone."""
    found = json.loads(data)
    if isinstance(found, dict):
        keys = list(found)
        for half in (keys[: len(keys) // 2], keys[len(keys) // 2 :]):
            yield f"with {half} alone", name, json.dumps({key: found[key] for key in half}).encode()


@law("TOK-18", since="1.2")
def check_a_renamed_token_is_another_vocabulary(rig: Rig) -> None:
    """A copy with one token renamed has another digest, so neither accepts the other's state.

    Refusing the copy is right, too.
    """
    path, tokenizer = Path(_path(rig)), rig.tokenizer
    names = {
        bytes(tokenizer.token_bytes(token))
        for token in range(tokenizer.n_vocab)
        if tokenizer.is_control(token) and not tokenizer.is_eog(token) and token != tokenizer.bos
    }
    long = sorted(name for name in names if len(name) >= 5 and name.isascii())  # noqa: PLR2004
    if not long:
        rig.leave("there is no control token whose name can be changed")
    old = long[0]
    new = old[:2] + bytes([old[2] ^ 1]) + old[3:]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        if path.is_dir():
            shutil.copytree(path, copy)
        else:
            shutil.copy(path, copy)
        changed = [_renamed(file, old, new) for file in _files(copy)]
        if not any(changed):
            rig.leave(f"{old!r} does not stand in the model's files as it is")
        try:
            with rig.open_at(str(copy)) as other:
                that(other.digest != rig.model.digest, "the digest of the model is the same")
                that(
                    other.tokenizer.digest != tokenizer.digest, "that of the tokenizer is the same"
                )
        except ModelLoadError:
            return


def _files(where: Path) -> list[Path]:
    return [file for file in where.rglob("*") if file.is_file()] if where.is_dir() else [where]


def _renamed(file: Path, old: bytes, new: bytes) -> bool:
    data = file.read_bytes()
    if old not in data:
        return False
    file.chmod(0o600)
    file.write_bytes(data.replace(old, new))
    return True
