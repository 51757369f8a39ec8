"""Where two features meet: embeddings and rows, shifts and aborts, two files of one name."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.conformance import gguf_copy
from infercore.conformance.expect import equal, that
from infercore.conformance.law import law
from infercore.conformance.laws.memory import need_proc, own_mib
from infercore.errors import (
    DecodeAbortedError,
    InvalidInputError,
    UnsupportedFeatureError,
)
from infercore.testing import engine_of
from infercore.values.config import AdapterSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from infercore.conformance.rig import Rig

REFUSED = (UnsupportedFeatureError, InvalidInputError)


# -- rows ------------------------------------------------------------------------------------------


@law("DEC-29", needs="embeddings", since="1.2")
def check_rows_while_embeddings_are_made(rig: Rig) -> None:
    """While embeddings are made, row i is still that of the i-th token that was to have one."""
    tokens = rig.tokens(14)
    wanted = (2, 3, 9, 13)
    expected = [rig.cold(tokens[: i + 1]) for i in wanted]
    try:
        context = rig.context(embeddings=True)
    except REFUSED:
        rig.leave("embeddings and logits are not made together")
    if context.capabilities.multi_sequence:
        context.decode_batch([(token, (0,), i in wanted) for i, token in enumerate(tokens)])
        _compare_rows(rig, context, expected, "a batch with embeddings")
        equal(len(context.embeddings()), len(tokens), "vectors of the batch")
        context.clear()
    context.decode(tokens[:4])
    rig.near(context.logits(), expected[1], "the last row with embeddings")
    context.set_embeddings(False)
    context.clear()
    if context.capabilities.logits_all:
        context.decode(tokens, logits="all")
        equal(context.n_outputs, len(tokens), "rows, embeddings switched off")
        rig.near(context.logits(9), expected[2], "a row, embeddings switched off")


def _compare_rows(rig: Rig, context: Any, expected: list[Any], what: str) -> None:
    equal(context.n_outputs, len(expected), f"rows of {what}")
    for i, row in enumerate(expected):
        rig.near(context.logits(i), row, f"row {i} of {what}")


# -- moving ----------------------------------------------------------------------------------------


@law("KV-29", needs="shift", since="1.2")
def check_an_abort_after_a_shift(rig: Rig) -> None:
    """Wherever the first step after a shift is aborted, it is as if it had not been tried.

    The same holds after positions were divided. The callback is asked in that step as in any.
    """
    tokens = rig.tokens(60)

    def shifted() -> Any:
        context = rig.context()
        context.decode(tokens)
        context.seq_remove(0, 7, 19)
        context.seq_shift(0, 19, -1, -12)
        return context

    def divided() -> Any:
        context = rig.context()
        context.decode(tokens)
        context.seq_remove(0, 7, 39)
        context.seq_divide(0, 39, -1, 2)
        return context

    _check_aborts(rig, shifted, 48)
    if rig.context().capabilities.kv_divide:
        _check_aborts(rig, divided, 30)


def _check_aborts(rig: Rig, moved: Callable[[], Any], n_past: int) -> None:
    more = rig.tokens(5)

    def rows_of(context: Any) -> list[Any]:
        context.decode(more)
        first = np.array(context.logits())
        context.decode_one(more[0])
        return [first, np.array(context.logits())]

    expected = rows_of(moved())
    plain = rig.context()
    plain.decode(rig.tokens(n_past))
    n_plain, n_moved = (_questions(context, more) for context in (plain, moved()))
    asks = plain.capabilities.abort and hasattr(engine_of(plain), "set_abort_callback")
    that(n_plain > 0 or not asks, "the engine never asked the callback that it was given")
    that(2 * n_moved >= n_plain, f"asked {n_moved} times after a move, {n_plain} without one")
    for n_asked in (1, 2, 3, 5, 9, 17):
        context = moved()
        asked: list[int] = []

        def stop(asked: list[int] = asked, most: int = n_asked) -> bool:
            asked.append(1)
            return len(asked) >= most

        context.set_abort_callback(stop)
        with contextlib.suppress(DecodeAbortedError):
            context.decode(more)
            context.seq_remove(0, n_past, -1)  # nobody was asked so often
        context.set_abort_callback(None)
        equal(context.n_past(), n_past, f"what is held after question {n_asked}")
        for row, wanted in zip(rows_of(context), expected, strict=True):
            rig.near(row, wanted, f"after an abort at question {n_asked}")


def _questions(context: Any, tokens: list[int]) -> int:
    """Return how often the engine asks a callback while ``tokens`` are decoded in one step.

    The core asks once itself, which is not counted.
    """
    asked: list[int] = []

    def note() -> bool:
        asked.append(1)
        return False

    context.set_abort_callback(note)
    context.decode(tokens)
    return len(asked) - 1


# -- threads ---------------------------------------------------------------------------------------


@law("THREAD-11", since="1.2")
def check_threads_given_at_opening(rig: Rig) -> None:
    """Threads asked for when a context is opened are those in force, or they are refused.

    By default there are no more of them than processors that the process may use, and for batches
    no fewer than for single tokens.
    """
    _check_default_threads(rig)
    for n in (1, 2, (os.cpu_count() or 1) + 1):
        try:
            context = rig.context(n_ctx=64, n_threads=n, n_threads_batch=n)
        except UnsupportedFeatureError:
            continue
        except InvalidInputError as error:
            that(n > 2 and "n_threads" in str(error), f"{n} threads: {error}")  # noqa: PLR2004
            continue
        found = tuple(context.effective[name] for name in ("n_threads", "n_threads_batch"))
        equal(found, (n, n), f"effective threads, {n} asked for")
        threads = rig.observe(context, 0).threads if rig.observe is not None else None
        if threads is not None:
            equal(threads, (n, n), f"the engine's own threads, {n} asked for")
        context.decode(rig.tokens(4))


def _check_default_threads(rig: Rig) -> None:
    with (
        contextlib.suppress(UnsupportedFeatureError, InvalidInputError),
        rig.model.new_context(n_ctx=32, n_threads=1) as context,
    ):
        told = context.effective.get("n_threads_batch")
        equal(told, 1, "threads of batches where those of single tokens alone are given")
    affinity = getattr(os, "sched_getaffinity", None)
    n = (os.cpu_count() or 1) if affinity is None else len(affinity(0))
    with rig.model.new_context(n_ctx=32) as context:
        single, batch = (context.effective.get(name) for name in ("n_threads", "n_threads_batch"))
    if isinstance(single, int) and isinstance(batch, int):
        that(1 <= single <= batch <= n, f"{single} threads and {batch} of {n} processors")


# -- texts -----------------------------------------------------------------------------------------


@law("TOK-21", since="1.2")
def check_a_text_of_many_thousand_tokens(rig: Rig) -> None:
    """A text far beyond the window is encoded whole, and comes back whole."""
    n = max(1, _MANY // max(1, len(rig.story)))
    text = "\n".join([rig.story] * n)
    ids = rig.tokenizer.encode(text, add_special=False)
    data = b"".join(map(rig.tokenizer.token_bytes, ids[-200:]))
    that(text.encode().endswith(data.lstrip()), f"the last of {len(ids)} tokens are not the end")
    equal(len(rig.tokenizer.decode(ids)), len(text), f"characters of {len(ids)} tokens")


_MANY = 60_000
"""Characters."""


# -- adapters --------------------------------------------------------------------------------------


@law("LORA-10", needs="lora", since="1.2")
def check_two_adapters_of_one_name(rig: Rig) -> None:
    """An adapter is known by its file, not by its name: another one in its place is another one."""
    if rig.adapter is None:
        rig.leave("the rig has no adapter")
    tokens, context = rig.tokens(7), rig.context()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for part in ("one", "two"):
            source, target = Path(rig.adapter), Path(folder) / part / Path(rig.adapter).name
            target.parent.mkdir()
            shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
            if part == "two" and not _weaken(target):
                rig.leave("where the adapter's file has its weights is not known here")
            context.set_adapters([AdapterSpec(path=str(target))])
            context.clear()
            context.decode(tokens)
            rows.append(np.array(context.logits()))
        gap = float(np.abs(rows[0] - rows[1]).max())
        that(gap > 0, "of two files of the same name the second gives the bits of the first")
        # And one that is written anew where it lies, as after another training.
        changed = Path(folder) / "one" / Path(rig.adapter).name
        context.set_adapters([AdapterSpec(path=str(changed))])
        _weaken(changed)
        context.set_adapters([AdapterSpec(path=str(changed))])
        context.clear()
        context.decode(tokens)
        rig.near(context.logits(), rows[1], "an adapter that was written anew and set again")
        again = rig.context(adapters=[AdapterSpec(path=str(changed))])
        again.decode(tokens)
        rig.near(again.logits(), rows[1], "an adapter whose file was written anew")
        if changed.suffix == ".gguf":
            _check_invoked(rig, changed)


def _check_invoked(rig: Rig, file: Path) -> None:
    """An adapter that works only behind certain tokens changes nothing without them, or is refused.

    By the name of what is not supported; the file stands beside it.
    """
    tokens = rig.tokens(7)
    key, absent = "adapter__alora__invocation_tokens", [t for t in range(40) if t not in tokens]
    changed = gguf_copy.read(file).other(**{key: gguf_copy.numbers("I", absent[:2])})
    file.write_bytes(changed.to_bytes())
    try:
        context = rig.context(adapters=[AdapterSpec(path=str(file))])
    except UnsupportedFeatureError as error:
        that(str(file) not in error.feature, f"a file is refused as a feature: {error.feature!r}")
        that(str(file) in str(error), f"the refusal does not name the file: {error}")
        return
    context.decode(tokens)
    rig.near(context.logits(), rig.cold(tokens), "an adapter whose tokens do not come")


_WEIGHTS = (".gguf", ".safetensors")


def _weaken(where: Path) -> bool:
    """Zero the numbers in the last eighth of the file with the weights; False without one."""
    files = [f for f in where.rglob("*") if f.is_file()] if where.is_dir() else [where]
    file = max(files, key=lambda each: each.stat().st_size)
    if file.suffix not in _WEIGHTS:
        return False
    file.chmod(0o600)
    data = bytearray(file.read_bytes())
    n = len(data) // 8 // 64 * 64
    data[-n:] = bytes(n)
    file.write_bytes(data)
    return True


# -- samplers --------------------------------------------------------------------------------------

N_SAMPLERS, SAMPLER_MIB = 24, 24
_WINDOW = 2**20


@law("MEM-12", tier="process", since="1.2")
def check_samplers_are_given_back(rig: Rig) -> None:
    """Samplers that were closed, and their clones, leave no memory behind."""
    need_proc(rig)

    def use(kind: str, window: int) -> None:
        fields = {"repeat_penalty": 1.1, "penalty_last_n": window, "implementation": kind}
        with contextlib.closing(rig.model.new_sampler(**fields)) as sampler:
            sampler.observe(rig.tokens(3))
            sampler.clone().close()

    kinds = ["portable"]
    if rig.model.capabilities.native_sampler:
        kinds.append("native")
    for kind in kinds:
        window = _WINDOW
        try:
            use(kind, window)
        except UnsupportedFeatureError:
            window = 64
        for _ in range(3):
            use(kind, window)
        before = own_mib()
        for _ in range(N_SAMPLERS):
            use(kind, window)
        left = own_mib() - before
        that(left < SAMPLER_MIB, f"{N_SAMPLERS} closed {kind} samplers left {left:.0f} MiB")
