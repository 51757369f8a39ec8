"""Ending what runs, from inside and from other threads."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.conformance.expect import equal, raises, that
from infercore.conformance.holding import Held, while_held
from infercore.conformance.law import law
from infercore.conformance.rig import generated, greedy
from infercore.errors import (
    DecodeAbortedError,
    InvalidInputError,
    OutputNotAvailableError,
    UnsupportedFeatureError,
)
from infercore.testing import engine_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from infercore.conformance.rig import Rig


class AfterCalls:
    """A callback that says True from the ``n``-th time on that it is asked."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


SMALL = {"n_batch": 4, "n_ubatch": 4}


@law("CANCEL-1")
def check_abort_in_a_prefill(rig: Rig) -> None:
    """A callback returning True aborts; what was evaluated is reported and can be built on."""
    tokens = rig.tokens(40)
    context = rig.context(**SMALL)
    context.set_abort_callback(AfterCalls(3))
    error = raises(DecodeAbortedError, lambda: context.decode(tokens), "an aborted decode")
    kept = context.n_past()
    equal(error.resident_tokens, kept, "resident tokens of the error")
    that(kept < len(tokens), "the whole prompt was evaluated all the same")
    equal(context.tokens(), tokens[:kept], "the tokens held")
    context.set_abort_callback(None)
    context.decode(tokens[kept:])
    rig.near(context.logits(), rig.cold(tokens), "after going on")


@law("CANCEL-2")
def check_no_logits_after_an_abort(rig: Rig) -> None:
    """After an abort there are no logits that could be taken for those of the prompt."""
    context = rig.context(**SMALL)
    context.decode(rig.tokens(3))
    context.set_abort_callback(lambda: True)
    raises(DecodeAbortedError, lambda: context.decode(rig.tokens(12)), "an aborted decode")
    raises(OutputNotAvailableError, context.logits, "logits after an abort")


@law("CANCEL-3")
def check_a_callback_is_taken_away(rig: Rig) -> None:
    """A callback is asked until it is removed; returning False has no effect."""
    asked: list[int] = []

    def note() -> bool:
        asked.append(1)
        return False

    context = rig.context(**SMALL)
    context.set_abort_callback(note)
    context.decode(rig.tokens(9))
    that(asked, "the callback was never asked")
    context.set_abort_callback(None)
    n = len(asked)
    context.decode(rig.tokens(9))
    equal(len(asked), n, "calls of a callback that was taken away")


@law("CANCEL-4")
def check_a_callback_that_raises(rig: Rig) -> None:
    """An exception in a callback is raised by the call it stopped; the context keeps working.

    The callback is not asked again by that call.
    """
    context = rig.context(**SMALL)
    asked: list[int] = []

    def fail() -> bool:
        asked.append(1)
        raise ZeroDivisionError("a callback of the caller's failed")

    context.set_abort_callback(fail)
    raises(ZeroDivisionError, lambda: context.decode(rig.tokens(9)), "a callback that raises")
    equal(len(asked), 1, "calls of a callback that raised at the first")
    context.set_abort_callback(None)
    context.clear()
    tokens = rig.tokens(5)
    context.decode(tokens)
    rig.near(context.logits(), rig.cold(tokens), "after a callback raised")


@law("CANCEL-5")
def check_abort_with_nothing_running(rig: Rig) -> None:
    """An abort with nothing to abort does not affect the next call."""
    tokens = rig.tokens(9)
    context = rig.context()
    context.abort()
    context.decode(tokens)
    context.abort()
    context.decode_one(tokens[0])
    rig.near(context.logits(), rig.cold([*tokens, tokens[0]]), "after idle aborts")


@law("CANCEL-6", tier="process")
def check_abort_from_another_thread(rig: Rig) -> None:
    """abort() from another thread stops the running call; the context keeps working."""
    tokens = rig.tokens(40)
    context = rig.context(**SMALL)
    context.decode(tokens[:6])
    held = Held()
    context.set_abort_callback(held)
    error = raises(
        DecodeAbortedError,
        lambda: while_held(held, lambda: context.decode(tokens[6:]), context.abort),
        "a decode that was aborted",
    )
    kept = context.n_past()
    that(6 <= kept < len(tokens), f"{kept} of {len(tokens)} tokens are held")  # noqa: PLR2004
    equal(kept, error.resident_tokens, "resident tokens of the error")
    context.decode(tokens[kept:])
    rig.near(context.logits(), rig.cold(tokens), "after going on")


@law("CANCEL-7", tier="process")
def check_cancelled_prefill_resumes(rig: Rig) -> None:
    """Cancelling a prefill keeps what was evaluated; asking again resumes there."""
    session = rig.session(**SMALL)
    context = rig.inner(session)
    text = rig.passage(40)
    half = text[: text.index(" ", len(text) // 2)]  # not within a word, whose tokens would change
    begun = session.ensure_prefix(half).prefix_tokens
    held = Held()
    context.set_abort_callback(held)
    error = raises(
        DecodeAbortedError,
        lambda: while_held(held, lambda: session.ensure_prefix(text), session.cancel),
        "a prefill that was cancelled",
    )
    status = session.ensure_prefix(text)
    equal(status.reused_tokens, error.resident_tokens, "tokens reused when asked again")
    that(status.reused_tokens >= begun - 2, f"{status.reused_tokens} of {begun} tokens were kept")
    rig.follows(rig.tokenizer.encode(text), greedy(session, 4), "after resuming")


@law("CANCEL-8", tier="session")
def check_cancelled_stream(rig: Rig) -> None:
    """session.cancel ends the stream with "cancelled"; what was shown is resident."""
    session = rig.session()
    text = rig.passage(8)
    session.ensure_prefix(text)
    stream = session.decode(max_tokens=100, temperature=0, ignore_eos=True)
    chunks = [next(stream)]
    thread = threading.Thread(target=session.cancel)
    thread.start()
    thread.join()
    chunks += list(stream)
    equal(chunks[-1].finish_reason, "cancelled", "finish_reason")
    shown = generated(chunks)
    equal(session.explain_context().generated_tokens, len(shown), "generated tokens")
    equal(session.state, "DECODED", "the state")
    rig.follows(rig.tokenizer.encode(text) + shown, greedy(session, 4), "after a cancel")


@law("CANCEL-9", tier="session")
def check_cancel_does_not_stick(rig: Rig) -> None:
    """A cancel with nothing to cancel does not affect the next call."""
    session = rig.session()
    session.cancel()
    text = rig.passage(8)
    session.ensure_prefix(text)
    session.cancel()
    chunks = list(session.decode(max_tokens=6, temperature=0, ignore_eos=True))
    equal((len(generated(chunks)), chunks[-1].finish_reason), (6, "length"), "the next stream")


@law("CANCEL-10")
def check_what_is_no_callback(rig: Rig) -> None:
    """A callback that cannot be called raises InvalidInputError."""
    context = rig.context()
    raises(InvalidInputError, lambda: context.set_abort_callback(5), "a callback of 5")
    context.decode(rig.tokens(3))


@law("CANCEL-11", tier="session")
def check_cancel_within_a_step(rig: Rig) -> None:
    """A cancel from within a step ends the stream soon, not at max_tokens."""
    session = rig.session()
    session.ensure_prefix(rig.passage(6))
    chunks = []
    for chunk in session.decode(max_tokens=60, temperature=0, ignore_eos=True):
        chunks.append(chunk)
        if len(chunks) == 2:  # noqa: PLR2004
            session.cancel()
    equal(chunks[-1].finish_reason, "cancelled", "finish_reason")
    that(len(generated(chunks)) < 20, f"{len(generated(chunks))} tokens came after the cancel")  # noqa: PLR2004


@law("CANCEL-14", since="1.2")
def check_the_engine_hears_an_abort(rig: Rig) -> None:
    """The engine's own abort, given past the API, ends each kind of call until it is cleared.

    Calls of another context go on. A callback that was set is asked afterwards as before.
    """
    tokens = rig.tokens(24)
    context = rig.context()
    if not context.capabilities.abort:
        rig.leave("the engine cannot be stopped within a call")
    engine = engine_of(context)
    engine.abort()  # no callback was set before
    raises(DecodeAbortedError, lambda: context.decode(tokens), "the first call of a context")
    beside = rig.context()
    beside.decode(tokens)
    rig.near(beside.logits(), rig.cold(tokens), "beside a context that was told to abort")
    engine.clear_abort()
    context.decode(tokens[:12])
    calls = {
        "a prompt": lambda: context.decode(tokens[12:]),
        "a single token": lambda: context.decode_one(tokens[12]),
        "a batch": lambda: context.decode_batch([(tokens[12], (0,), True)]),
    }
    if not context.capabilities.multi_sequence:
        del calls["a batch"]
    # A callback that wants to go on does not take the abort back.
    for (what, call), goes_on in itertools.product(calls.items(), (None, lambda: False)):
        context.set_abort_callback(goes_on)
        engine.abort()
        raises(DecodeAbortedError, call, f"{what}, where the engine was told to abort")
        engine.clear_abort()
        equal((context.n_past(), context.tokens()), (12, tokens[:12]), f"held after {what}")
    context.set_abort_callback(None)
    context.decode(tokens[12:])
    rig.near(context.logits(), rig.cold(tokens), "after going on")
    # Some engines ask by time, and not as often each time.
    with_abort = max(_times_asked(rig, tokens, is_aborted=True) for _ in range(3))
    without = min(_times_asked(rig, tokens, is_aborted=False) for _ in range(3))
    what = f"asked {with_abort} times after the engine's own abort, {without} times without"
    that(2 * with_abort >= without, what)


def _times_asked(rig: Rig, tokens: list[int], *, is_aborted: bool) -> int:
    """Return how often a second call in small steps asks a callback; the first may be aborted."""
    asked, context = itertools.count(), rig.context(**SMALL)
    context.set_abort_callback(lambda: next(asked) < 0)
    if is_aborted:
        engine = engine_of(context)
        engine.abort()
        raises(DecodeAbortedError, lambda: context.decode(tokens), "what the engine aborts")
        engine.clear_abort()
    else:
        context.decode(tokens)
    context.clear()
    before = next(asked)
    context.decode(tokens)
    return next(asked) - before - 1


@law("CANCEL-15", since="1.2")
def check_a_callback_is_asked_in_each_step(rig: Rig) -> None:
    """A callback is asked in each compute step of a call, and may end it at any of them."""
    tokens = rig.tokens(40)
    context = rig.context(n_batch=32, n_ubatch=8)
    if getattr(engine_of(context), "set_abort_callback", None) is None:
        rig.leave("the engine cannot ask within a call: the core asks between calls")
    asked: list[int] = []

    def note() -> bool:
        asked.append(1)
        return False

    def stopped(callback: Any) -> int:
        context.clear()
        context.decode(tokens[:8])
        context.set_abort_callback(callback)
        for _ in range(2):  # it stays where it was set
            raises(DecodeAbortedError, lambda: context.decode(tokens[8:]), "an aborted decode")
        context.set_abort_callback(None)
        return int(context.n_past())

    context.set_abort_callback(note)
    context.decode(tokens[:8])
    once = len(asked)
    context.decode(tokens[8:])
    more, n_steps = len(asked) - once, 32 // context.n_ubatch
    least = max(n_steps, 2 * once) if n_steps > 1 else 1
    that(more >= least, f"asked {more} times in {n_steps} steps, {once} times in one")
    context.set_abort_callback(None)
    kept = stopped(AfterCalls(more - 1))
    that(8 <= kept < len(tokens), f"{kept} tokens are held after the last answer")  # noqa: PLR2004
    equal(context.tokens(), tokens[:kept], "the tokens held")
    equal(stopped(lambda: True), 8, "tokens held after the first answer")
    context.decode(tokens[8:])
    rig.near(context.logits(), rig.cold(tokens), "after going on")
    if context.capabilities.multi_sequence:
        both = rig.two()
        both.set_abort_callback(lambda: True)
        batch = [(token, (i % 2,), False) for i, token in enumerate(tokens[:8])]
        raises(DecodeAbortedError, lambda: both.decode_batch(batch), "a batch of two sequences")
        _check_steps_of_two(rig, tokens)


def _check_steps_of_two(rig: Rig, tokens: list[int]) -> None:
    """So too where the tokens of a call are two sequences', and where they are vectors."""
    vectors = np.random.default_rng(0).standard_normal((16, rig.model.info.n_embd))
    rows = vectors.astype(np.float32)

    def batch(n: int) -> list[Any]:
        return [(token, (i % 2,), False) for i, token in enumerate(tokens[: 2 * n])]

    calls: dict[str, Callable[[Any, int], object]] = {
        "decode_batch": lambda context, n: context.decode_batch(batch(n)),
        "decode_spans": lambda context, n: context.decode_spans(
            [(s, tokens[:n], "last") for s in (0, 1)]
        ),
        "decode_spans of vectors": lambda context, n: context.decode_spans(
            [(s, rows[:n], "last") for s in (0, 1)]
        ),
    }
    if not rig.model.info.n_embd:  # not known
        del calls["decode_spans of vectors"]
    for name, call in calls.items():
        context, asked = rig.two(n_batch=32, n_ubatch=8), itertools.count()
        context.set_abort_callback(lambda asked=asked: next(asked) < 0)
        try:
            call(context, 4)  # one step
        except UnsupportedFeatureError:
            continue
        once = next(asked)
        context.clear()
        call(context, 16)
        more, n_steps = next(asked) - once - 1, 32 // context.n_ubatch
        least = max(n_steps, once + 1) if n_steps > 1 else 1
        that(more >= least, f"{name} asked {more} times in {n_steps} steps, {once} times in one")
        context.clear()
        context.set_abort_callback(AfterCalls(more - 1))
        raises(DecodeAbortedError, lambda: call(context, 16), f"{name}, told to stop at the end")  # noqa: B023
