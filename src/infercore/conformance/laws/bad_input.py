"""What is refused, how, and that nothing is lost by it."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from infercore.conformance.expect import LawError, equal, foreseen, raises, that
from infercore.conformance.law import law
from infercore.conformance.laws.tokens import BAD_TOKENS
from infercore.errors import (
    InferCoreError,
    InvalidInputError,
    InvalidPositionError,
    InvalidSequenceError,
    InvalidTokenError,
    ModelLoadError,
    ModelNotFoundError,
    UnsupportedFeatureError,
)
from infercore.values.config import ContextConfig

if TYPE_CHECKING:
    from infercore.conformance.rig import Rig

OPTIONS: dict[str, tuple[Any, ...]] = {
    "n_batch": (16,),
    "n_ubatch": (16,),
    "n_seq_max": (2, 3),
    "n_threads": (1, 2),
    "n_threads_batch": (1, 2),
    "rope_scaling_type": ("none", "linear", "yarn", "longrope"),
    "rope_freq_base": (20000.0,),
    "yarn_ext_factor": (0.5,),
    "yarn_attn_factor": (0.5,),
    "yarn_beta_fast": (16.0,),
    "yarn_beta_slow": (2.0,),
    "yarn_orig_ctx": (512,),
    "pooling_type": ("none", "mean", "cls", "last", "rank"),
    "attention_type": ("causal", "non-causal"),
    "flash_attn": ("on", "off"),
    "embeddings": (True, False),
    "offload_kqv": (True, False),
    "op_offload": (True, False),
    "swa_full": (True, False),
    "kv_unified": (True, False),
    "no_perf": (True, False),
    "precision": ("fast", "accurate"),
}
"""Values of context options; each is honoured or refused."""

BAD_OPTIONS: dict[str, tuple[Any, ...]] = {
    "n_ctx": (-1, 2**40, 1.5, "8", True),
    "n_batch": (0, -1, "8"),
    "n_ubatch": (0,),
    "n_seq_max": (0, 257),
    "n_threads": (0, 10**6),
    "flash_attn": ("sometimes",),
    "type_k": ("f17",),
    "pooling_type": ("sum",),
    "embeddings": ("yes",),
    "defrag_thold": (0.1,),
    "adapters": (("lora.gguf",),),
}


def _held(rig: Rig) -> Any:
    context = rig.context()
    context.decode(rig.tokens(6))
    return context


@law("BAD-1")
def check_bad_tokens(rig: Rig) -> None:
    """A token outside the vocabulary raises InvalidTokenError and changes nothing."""
    context = _held(rig)
    good = rig.tokens(2)
    with rig.unchanged(context):
        for bad in (*BAD_TOKENS, rig.tokenizer.n_vocab):
            for name, call in {
                "decode": lambda t=bad: context.decode([*good, t]),
                "decode_one": lambda t=bad: context.decode_one(t),
                "eval": lambda t=bad: context.eval([t], 4),
            }.items():
                raises(InvalidTokenError, call, f"{name} of token {bad!r}")


@law("BAD-2")
def check_bad_sequences(rig: Rig) -> None:
    """A sequence that does not exist raises InvalidSequenceError and changes nothing."""
    context = _held(rig)
    token = rig.tokens(1)[0]
    with rig.unchanged(context):
        for bad in (-2, 1, 2**31, 1.5, "0", None):
            for name, call in {
                "decode": lambda s=bad: context.decode([token], seq_id=s),
                "decode_one": lambda s=bad: context.decode_one(token, seq_id=s),
                "n_past": lambda s=bad: context.n_past(s),
                "seq_remove": lambda s=bad: context.seq_remove(s),
            }.items():
                raises(InvalidSequenceError, call, f"{name} of sequence {bad!r}")


@law("BAD-3")
def check_bad_positions(rig: Rig) -> None:
    """An impossible position raises InvalidPositionError and changes nothing."""
    context = _held(rig)
    tokens = rig.tokens(2)
    with rig.unchanged(context):
        for bad in (-1, 7, 2**40, 1.5, "0", None):
            raises(InvalidPositionError, lambda p=bad: context.eval(tokens, p), f"eval at {bad!r}")
        for p0, p1 in ((-2, 3), (0, -2), (1.5, 3), ("0", 1), (4, 2)):
            raises(
                InvalidPositionError,
                lambda a=p0, b=p1: context.seq_remove(0, a, b),
                f"seq_remove(0, {p0!r}, {p1!r})",
            )


@law("BAD-4")
def check_bad_modes(rig: Rig) -> None:
    """A logits mode or an index that does not exist raises InvalidInputError."""
    context = _held(rig)
    with rig.unchanged(context):
        for mode in ("some", "", None, 1):
            raises(
                InvalidInputError,
                lambda m=mode: context.decode(rig.tokens(2), logits=m),
                f"logits={mode!r}",
            )
        for index in ("0", 1.5, None):
            raises(InvalidInputError, lambda i=index: context.logits(i), f"logits({index!r})")


@law("BAD-5")
def check_what_is_no_list_of_tokens(rig: Rig) -> None:
    """Anything but a sequence of tokens raises InvalidInputError and changes nothing."""
    context = _held(rig)
    with rig.unchanged(context):
        for bad in ("text", 5, None, [[1, 2]], {"a": 1}):
            raises(InvalidInputError, lambda b=bad: context.decode(b), f"decode({bad!r})")


@law("BAD-6")
def check_unknown_fields(rig: Rig) -> None:
    """An unknown field or option raises InvalidInputError, which names the nearest."""
    error = raises(InvalidInputError, lambda: rig.model.new_context(n_ctxx=5), "n_ctxx")
    that("n_ctx" in str(error), f"the error does not name n_ctx: {error}")
    raises(
        InvalidInputError,
        lambda: rig.model.new_context(backend_options={"no such option": 1}),
        "an unknown option of the engine",
    )
    raises(InvalidInputError, lambda: rig.model.new_sampler(temprature=1), "temprature")


@law("BAD-7")
def check_bad_options(rig: Rig) -> None:
    """A value not allowed for a context option raises InvalidInputError naming the option."""
    for field, values in BAD_OPTIONS.items():
        for value in values:
            error = raises(
                InvalidInputError,
                lambda f=field, v=value: rig.model.new_context(**{f: v}),
                f"{field}={value!r}",
            )
            equal(error.field, field, f"the field of the error for {field}={value!r}")


_OFFLOADS = ("offload_kqv", "op_offload")


@law("BAD-8", model="any")
def check_no_option_is_ignored(rig: Rig) -> None:
    """Every context option is honoured, as effective shows, or refused; none is ignored."""
    for field, values in OPTIONS.items():
        for value in values:
            try:
                context = rig.model.new_context(n_ctx=64, **{field: value})
            except (UnsupportedFeatureError, InvalidInputError):
                continue
            with context:
                found = context.effective.get(field)
                if field in _OFFLOADS and found is False and not context.capabilities.gpu_offload:
                    continue  # told: without a GPU there is nothing to move there
                if field == "no_perf" and found is None:
                    continue  # the core counts, so an engine need not know of it
                equal(found, value, f"effective[{field!r}]")


@law("BAD-9")
def check_options_that_exclude_each_other(rig: Rig) -> None:
    """A quantised V without flash attention is refused before anything is allocated."""
    raises(
        InvalidInputError,
        lambda: rig.model.new_context(n_ctx=64, flash_attn="off", type_v="q8_0"),
        "a quantised V without flash attention",
    )


@law("BAD-10", model="any")
def check_no_such_file(rig: Rig) -> None:
    """A path that does not exist raises ModelNotFoundError, which carries the path.

    A pipe, which no model can be read from, is refused without waiting for somebody to write.
    """
    opened, suffix = _opener(rig), Path(rig.path or "").suffix
    with tempfile.TemporaryDirectory() as folder:
        for name in {"none", f"none{suffix}"}:
            missing = str(Path(folder) / name)
            error = raises(ModelNotFoundError, lambda p=missing: opened(p), "a missing file")
            that(missing in str(error.path), f"the error's path is {error.path!r}")
        empty = raises(ModelLoadError, lambda: opened(folder), "an empty folder")
        if hasattr(os, "mkfifo"):
            pipe = str(Path(folder) / f"pipe{suffix}")
            os.mkfifo(pipe)
            refused = raises(ModelLoadError, lambda: opened(pipe), "a pipe")
            foreseen(refused, "a pipe")
            that(pipe in str(refused.path), f"the path of the error of a pipe is {refused.path!r}")
    that(folder in str(getattr(empty, "path", folder)), f"the path of an empty folder: {empty!r}")


def _opener(rig: Rig) -> Any:
    if rig.open_path is None:
        rig.leave("the rig cannot open other paths")
    return rig.open_path


@law("BAD-11", model="any", tier="process")
def check_damaged_model(rig: Rig) -> None:
    """A model cut in half, or all zeros, raises a typed load error; others can still be loaded."""
    opened = _opener(rig)
    if rig.path is None:
        rig.leave("the rig does not tell where its model lies")
    for damage in (_halve, _blank):
        with tempfile.TemporaryDirectory() as folder:
            path = _copy(Path(rig.path), Path(folder))
            damage(_largest(path))
            what = f"a model after {damage.__name__}"
            raises(ModelLoadError, lambda p=str(path): opened(p), what)
    rig.another_model()


def _copy(source: Path, folder: Path) -> Path:
    target = folder / source.name
    return Path(shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target))


def _largest(path: Path) -> Path:
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return max(files, key=lambda file: file.stat().st_size)


def _halve(file: Path) -> None:
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size // 2)


def _blank(file: Path) -> None:
    file.write_bytes(b"")


@law("BAD-12", tier="session")
def check_bad_decode_options(rig: Rig) -> None:
    """An invalid decode option raises InvalidInputError, and the session stays usable."""
    session = rig.session()
    session.ensure_prefix(rig.passage(5))
    for fields in (
        {"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": 1.5}, {"stop": [""]}, {"stop": [5]},
        {"temperature": -1}, {"top_p": 2}, {"seed": -1}, {"seed": 2**32}, {"logprobs": -1},
        {"processors": [5]}, {"max_token": 5}, {"stop_tokens": ["a"]},
    ):  # fmt: skip
        raises(InvalidInputError, lambda f=fields: list(session.decode(**f)), f"decode({fields})")
    that(list(session.decode(max_tokens=1)), "nothing was generated afterwards")


@law("BAD-13")
def check_errors_are_typed(rig: Rig) -> None:
    """Errors subclass the nearest builtin, carry their facts, and say what to do."""
    context = _held(rig)
    for call, builtin in (
        (lambda: context.decode([-1]), ValueError),
        (lambda: context.decode([1] * (rig.n_ctx + 1)), ValueError),
        (lambda: context.seq_remove(9), ValueError),
        (lambda: rig.context(n_ctx=64).logits(), RuntimeError),
    ):
        error = raises(builtin, call, "a wrong call")
        that(isinstance(error, InferCoreError), f"{type(error).__name__} is none of infercore's")
        that(len(str(error)) > 20, f"the error says only {str(error)!r}")  # noqa: PLR2004


@law("BAD-14")
def check_unknown_pooling_and_types(rig: Rig) -> None:
    """A type, pooling or attention that is not declared is refused as unsupported."""
    kinds = rig.context().capabilities
    for field, declared in (
        ("type_k", kinds.kv_types),
        ("pooling_type", kinds.pooling),
        ("flash_attn", kinds.flash_attention),
    ):
        for value in _possible(field):
            if value not in declared and value != "none":
                _refused(rig, field, value)


def _possible(field: str) -> tuple[str, ...]:
    return {
        "type_k": ("f32", "f16", "bf16", "q8_0", "q4_0", "u8"),
        "pooling_type": ("mean", "cls", "last", "rank"),
        "flash_attn": ("on",),
    }[field]


def _refused(rig: Rig, field: str, value: str) -> None:
    own = {name: rig.exact[name] for name in ("backend_options", "precision") if name in rig.exact}
    try:
        with rig.model.new_context(n_ctx=64, **own, **{field: value}):
            raise LawError(f"{field}={value!r} is not declared, and was not refused")
    except (UnsupportedFeatureError, InvalidInputError):
        return


@law("BAD-15")
def check_config_or_fields(rig: Rig) -> None:
    """A config and its fields as keywords open the same context."""
    fields = rig.fields(n_ctx=40)
    by_config = rig.opened(rig.model.new_context(ContextConfig(**fields)))
    equal(by_config.n_ctx, rig.context(n_ctx=40).n_ctx, "n_ctx")
    frozen = raises(
        AttributeError, lambda: setattr(ContextConfig(), "n_ctx", 5), "a change of a config"
    )
    that(isinstance(frozen, attrs.exceptions.FrozenInstanceError), "the config is not frozen")
