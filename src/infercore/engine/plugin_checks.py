"""What a plugin's objects must be like: a mistake there is a `PluginError`, never the caller's."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from infercore.errors import PluginError, PluginLoadError
from infercore.values import checks
from infercore.values.info import Capabilities, MemoryPlan, ModelInfo

if TYPE_CHECKING:
    from infercore.protocols.spi import FloatArray

ALWAYS_EFFECTIVE = ("n_threads", "n_threads_batch")
_OF_MODEL = ("close",)
_OF_TOKENIZER = ("encode", "token_bytes", "is_eog", "is_control")
_OF_SAMPLER = ("sample", "observe", "reset", "clone", "close")
_OF_CONTEXT = ("decode", "seq_remove", "n_past", "close")
_SHOWN = 60


def wrong(backend: str, call: str, what: str) -> PluginError:
    """Return the error for a call of the plugin that gave ``what`` it should not."""
    return PluginError(
        f"backend {backend!r}: {call} {what}; this is a bug in the plugin, not in your call",
        plugin=backend,
    )


def shown(value: object) -> str:
    """Return ``value`` with its type, shortened."""
    text = checks.shown(value)
    return f"{type(value).__name__} {text if len(text) <= _SHOWN else text[:_SHOWN] + '...'}"


def check_model(model: Any, backend: str) -> None:
    """Refuse what a loader returned if it is no `EngineModel`."""
    if model is None:
        raise wrong(backend, "loader(path, config)", "returned None, not a model")
    _check_type(model, "info", ModelInfo, "loader(path, config)", backend)
    _check_type(model, "capabilities", Capabilities, "loader(path, config)", backend)
    _check_callable(model, (*_OF_MODEL, opener_of(model)), "loader(path, config)", backend)
    if model.capabilities.native_sampler and not callable(getattr(model, "new_sampler", None)):
        raise PluginLoadError(
            f"backend {backend!r} declares native_sampler without the model's method new_sampler",
            plugin=backend,
        )
    _check_files(model, backend)
    if getattr(model, "tokenizer", None) is None:
        raise wrong(backend, "loader(path, config)", "returned a model without a tokenizer")
    _check_tokenizer(model.tokenizer, model.info, backend)


def opener_of(model: Any) -> str:
    """Return the call of a model that opens a context: a session, where it shows no logits."""
    return "new_session" if model.capabilities.logits == "none" else "new_context"


def _check_type(thing: Any, name: str, kind: type, call: str, backend: str) -> None:
    value = getattr(thing, name, None)
    if not isinstance(value, kind):
        made = f"gave an object whose {name} is {shown(value)}, not infercore.{kind.__name__}"
        raise wrong(backend, call, made)


def _check_callable(thing: Any, names: Sequence[str], call: str, backend: str) -> None:
    missing = [name for name in names if not callable(getattr(thing, name, None))]
    if missing:
        kind = type(thing).__name__
        raise wrong(backend, call, f"gave a {kind} without the methods {', '.join(missing)}")


def _check_files(model: Any, backend: str) -> None:
    files = getattr(model, "files", None)
    if isinstance(files, (str, bytes)) or not isinstance(files, Sequence):
        raise wrong(backend, "model.files", f"is {shown(files)}, not a sequence of paths")
    if not files and not isinstance(getattr(model, "digest", None), str):
        raise wrong(backend, "model.files", "is empty, and the model has no digest of its own")
    for file in files:
        if not isinstance(file, (str, os.PathLike)) or not os.path.exists(file):
            raise wrong(backend, "model.files", f"names {file!r}, where nothing is")


def _check_tokenizer(tokenizer: Any, info: ModelInfo, backend: str) -> None:
    _check_callable(tokenizer, _OF_TOKENIZER, "model.tokenizer", backend)
    n_vocab = getattr(tokenizer, "n_vocab", None)
    if not checks.is_integer(n_vocab) or n_vocab != info.n_vocab:
        told = f"is {shown(n_vocab)}, and info.n_vocab is {info.n_vocab}"
        raise wrong(backend, "model.tokenizer.n_vocab", told)
    for name in ("bos", "eos", "eot"):
        token: Any = getattr(tokenizer, name, "missing")
        if token is not None and not (checks.is_integer(token) and 0 <= token < info.n_vocab):
            told = f"is {shown(token)}, not an id of the vocabulary or None"
            raise wrong(backend, f"model.tokenizer.{name}", told)
    if not isinstance(getattr(tokenizer, "add_bos", None), bool):
        told = f"is {shown(getattr(tokenizer, 'add_bos', None))}, not True or False"
        raise wrong(backend, "model.tokenizer.add_bos", told)
    template = getattr(tokenizer, "chat_template", "")
    if template is not None and not isinstance(template, str):
        told = f"is {shown(template)}, not a str or None"
        raise wrong(backend, "model.tokenizer.chat_template", told)


def check_context(context: Any, backend: str) -> None:
    """Refuse what ``new_context`` or ``new_session`` returned if it is no such thing."""
    call = "model.new_context(config)"
    if context is None:
        raise wrong(backend, call, "returned None, not a context")
    _check_type(context, "capabilities", Capabilities, call, backend)
    rows = () if context.capabilities.logits == "none" else ("logits",)
    _check_callable(context, (*_OF_CONTEXT, *rows), call, backend)
    effective = getattr(context, "effective", None)
    if not isinstance(effective, Mapping):
        raise wrong(backend, "context.effective", f"is {shown(effective)}, not a mapping")
    missing = [name for name in ALWAYS_EFFECTIVE if effective.get(name) is None]
    if missing:
        raise PluginLoadError(
            f"backend {backend!r}: context.effective lacks {', '.join(missing)}, which it always "
            "has; this is a bug in the plugin",
            plugin=backend,
        )
    for name in ("n_batch", "n_ubatch"):
        value = getattr(context, name, None)
        if not checks.is_integer(value) or value < 1:  # type: ignore[operator]  # an integer then
            raise wrong(backend, f"context.{name}", f"is {shown(value)}, not a number of tokens")
    tolerance = getattr(context, "tolerance", None)
    if not checks.is_finite(tolerance) or tolerance < 0:  # type: ignore[operator]
        raise wrong(backend, "context.tolerance", f"is {shown(tolerance)}, not a number of 0 or up")


def check_ids(ids: Any, n_vocab: int, backend: str) -> list[int]:
    """Return what ``encode`` gave as a list of ids, refused if it is none."""
    is_plain = type(ids) is list and set(map(type, ids)) == {int}
    if is_plain and min(ids) >= 0 and max(ids) < n_vocab:
        return list(ids)
    call = "tokenizer.encode(text)"
    if not isinstance(ids, (list, tuple)):
        raise wrong(backend, call, f"returned {shown(ids)}, not a list of token ids")
    for token in ids:
        if not checks.is_integer(token):
            raise wrong(backend, call, f"returned {shown(token)} among the token ids")
        if not 0 <= token < n_vocab:
            told = f"returned id {token}, and the vocabulary has 0 to {n_vocab - 1}"
            raise wrong(backend, call, told)
    return [int(token) for token in ids]


def check_piece(piece: Any, token: int, backend: str) -> bytes:
    """Return the bytes that ``token_bytes`` gave, refused if they are none."""
    if not isinstance(piece, bytes):
        call = f"tokenizer.token_bytes({token})"
        raise wrong(backend, call, f"returned {shown(piece)}, not bytes")
    return piece


def check_flag(value: Any, name: str, token: int, backend: str) -> bool:
    """Return what ``is_eog`` or ``is_control`` gave, refused if it is no bool."""
    if not isinstance(value, bool) and type(value).__name__ not in ("bool_", "bool"):
        raise wrong(backend, f"tokenizer.{name}({token})", f"returned {shown(value)}, not a bool")
    return bool(value)


def check_plan(plan: Any, backend: str) -> MemoryPlan:
    """Return what ``plan_memory`` gave, refused if it is no plan."""
    if not isinstance(plan, MemoryPlan):
        raise wrong(backend, "plan_memory", f"returned {shown(plan)}, not infercore.MemoryPlan")
    for name in ("weights_bytes", "kv_bytes", "compute_bytes", "peak_bytes"):
        n_bytes = getattr(plan, name)
        if not checks.is_integer(n_bytes) or n_bytes < 0:
            told = f"returned a plan with {name}={shown(n_bytes)}, not a number of bytes"
            raise wrong(backend, "plan_memory", told)
    return plan


def check_sampler(sampler: Any, backend: str) -> Any:
    """Return what ``new_sampler`` or ``clone`` gave, refused if it is no sampler."""
    _check_callable(sampler, _OF_SAMPLER, "new_sampler(config)", backend)
    return sampler


def check_sampled(token: Any, n_vocab: int, backend: str) -> int:
    """Return the token that an engine's own sampler chose, refused if it is none."""
    if not checks.is_integer(token) or not 0 <= token < n_vocab:
        told = f"returned {shown(token)}, not an id from 0 to {n_vocab - 1}"
        raise wrong(backend, "sampler.sample(context, i)", told)
    return int(token)


def wrong_row(row: Any, n_vocab: int, backend: str) -> PluginError | None:
    """Return what is wrong with a row of logits, None where it is float32 [n_vocab]."""
    shape, dtype = getattr(row, "shape", None), getattr(row, "dtype", None)
    if shape == (n_vocab,) and str(dtype) == "float32":
        return None
    return wrong(backend, "context.logits(i)", f"returned {_array(row)}, not float32 [{n_vocab}]")


def _array(value: Any) -> str:
    """Return what kind of array ``value`` is; shortened, where it is none."""
    shape = getattr(value, "shape", None)
    return shown(value) if shape is None else f"{_dtype(value)}{list(shape)}"


def _dtype(value: Any) -> str:
    return str(getattr(value, "dtype", None))


def check_vector(vector: Any, seq_id: int, backend: str) -> FloatArray:
    """Return the pooled embedding that ``embedding`` gave, refused if it is no float32 [n]."""
    shape: tuple[int, ...] = getattr(vector, "shape", ())
    if len(shape) == 1 and shape[0] > 0 and _dtype(vector) == "float32":
        return cast("FloatArray", vector)
    told = f"returned {_array(vector)}, not float32 [n_embd]"
    raise wrong(backend, f"context.embedding({seq_id})", told)


def check_vectors(vectors: Any, n_tokens: int | None, backend: str) -> FloatArray:
    """Return what ``embeddings`` gave, refused if it is not a vector for each of ``n_tokens``."""
    shape: tuple[int, ...] = getattr(vectors, "shape", ())
    is_table = len(shape) == 2 and shape[1] > 0  # noqa: PLR2004  (rows and columns)
    if is_table and n_tokens in (None, shape[0]) and _dtype(vectors) == "float32":
        return cast("FloatArray", vectors)
    wanted = "n_tokens" if n_tokens is None else n_tokens
    told = f"returned {_array(vectors)}, not float32 [{wanted}, n_embd]"
    raise wrong(backend, "context.embeddings()", told)
