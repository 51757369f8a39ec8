"""What ends a text, what may not, what comes never twice, how likely the prompt was, and time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.conformance.expect import equal, that
from infercore.conformance.law import law
from infercore.conformance.laws.streaming import Forced
from infercore.conformance.rig import generated, greedy, joined
from infercore.errors import CallTimeoutError

if TYPE_CHECKING:
    from infercore.conformance.rig import Rig

LATE_S = 5.0
"""By how much a call may miss its time on a machine that does other things too."""


def _forced(rig: Rig, tokens: list[int], **fields: Any) -> list[Any]:
    session = rig.session()
    session.ensure_prefix(rig.passage(4))
    asked = {"max_tokens": len(tokens), "temperature": 0, "ignore_eos": False, **fields}
    return list(session.decode(processors=[Forced(tokens)], **asked))


@law("STREAM-19", tier="session", since="1.2")
def check_what_ended_a_text_is_told(rig: Rig) -> None:
    """The last chunk names the stop string or the token that ended the text, and no other does."""
    tokens, end = list(dict.fromkeys(rig.tokens(30)))[:8], rig.tokenizer.eos
    whole = rig.tokenizer.decode(tokens)
    stop = whole[len(whole) // 2 :][:3]
    cases: list[tuple[dict[str, Any], list[int], tuple[str, Any]]] = [
        ({"stop": ["\x00never", stop]}, tokens, ("stop", stop)),
        ({"stop_tokens": [tokens[5]]}, tokens, ("stop", tokens[5])),
        ({}, tokens, ("length", None)),
    ]
    if end is not None:
        cases.append(({"max_tokens": 20}, [*tokens, end], ("eos", end)))
    for fields, forced, wanted in cases:
        chunks = _forced(rig, forced, **fields)
        found = (chunks[-1].finish_reason, chunks[-1].stopped_by)
        equal(found, wanted, f"finish_reason and stopped_by with {fields}")
        equal({chunk.stopped_by for chunk in chunks[:-1]} - {None}, set(), "said before the end")


@law("STREAM-20", tier="session", since="1.2")
def check_the_stop_string_is_left_on_request(rig: Rig) -> None:
    """With include_stop the text ends with the stop string, also when it spans tokens."""
    tokens = rig.tokens(16)
    whole = rig.tokenizer.decode(tokens)
    for start in range(2, len(whole) - 6, max(1, len(whole) // 6)):
        stop = whole[start : start + 5]
        bare, kept = (_forced(rig, tokens, stop=[stop], include_stop=on) for on in (False, True))
        equal(joined(kept), joined(bare) + stop, f"the text with stop {stop!r}")
        equal(generated(kept), generated(bare), "the tokens of both")


@law("STREAM-21", tier="session", since="1.2")
def check_nothing_ends_a_text_too_early(rig: Rig) -> None:
    """Up to min_tokens no end token, stop token or stop string ends a text; after it they do.

    What would have ended it is not generated, or waits.
    """
    text, n, end = rig.passage(8), 5, rig.tokenizer.eos
    session = rig.session()
    for at in (0, 2):
        session.ensure_prefix(text)
        whole = greedy(session, 9)
        session.ensure_prefix(text)
        found = greedy(session, 9, stop_tokens=[whole[at]], min_tokens=n, ignore_eos=True)
        that(whole[at] not in found[:n], f"the stop token {whole[at]} was generated")
        that(len(found) >= n, f"{len(found)} of {n} tokens")
    session.ensure_prefix(text)
    spoken = rig.tokenizer.decode(whole)[:3]
    chunks = list(
        session.decode(max_tokens=9, temperature=0, ignore_eos=True, stop=spoken, min_tokens=n)
    )
    that(len(generated(chunks)) >= n, "a stop string ended the text too early")
    that(joined(chunks).startswith(spoken), "a stop string that waited is not shown")
    if end is None:
        return
    session.ensure_prefix(text)
    eager = {"logit_bias": {end: 100.0}, "temperature": 0, "max_tokens": 20}
    equal(generated(list(session.decode(**eager))), [], "tokens before an end that is wished for")
    session.ensure_prefix(text)
    chunks = list(session.decode(**eager, min_tokens=n))
    equal((len(generated(chunks)), chunks[-1].stopped_by), (n, end), "tokens, and the end")


@law("SAMP-26", tier="session", since="1.2")
def check_no_run_of_tokens_comes_twice(rig: Rig) -> None:
    """With no_repeat_ngram_size=n no run of n tokens of prompt and text occurs twice.

    Among the tokens that are left the likeliest is taken.
    """
    session, prompt = rig.session(), rig.tokens(20)
    for n in (1, 2, 3):
        session.ensure_prefix(prompt)
        found = greedy(session, 24, no_repeat_ngram_size=n)
        every = [*prompt, *found]
        runs = [tuple(every[i : i + n]) for i in range(len(every) - n + 1)]
        new, old = runs[len(prompt) - n + 1 :], runs[: len(prompt) - n + 1]
        that(len(set(new)) == len(new), f"a run of {n} tokens was generated twice")
        that(not set(new) & set(old), f"a run of {n} tokens of the prompt was generated")
    session.ensure_prefix(prompt)
    free = greedy(session, 5)
    session.ensure_prefix(prompt)
    equal(greedy(session, 5, no_repeat_ngram_size=200), free, "with runs longer than the text")


@law("STREAM-22", tier="session", since="1.2", needs="logits_all")
def check_prompt_logprobs(rig: Rig) -> None:
    """The first chunk reports how likely each prompt token was, as a cold run computes it.

    The text is that without it.
    """
    session, tokens = rig.session(), rig.tokens(14)
    session.ensure_prefix(tokens)
    plain = greedy(session, 4)
    session.ensure_prefix(tokens)
    asked: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    chunks = list(session.decode(prompt_logprobs=2, **asked))
    equal(generated(chunks), plain, "the text with prompt_logprobs")
    found = chunks[0].prompt_logprobs or ()
    equal([one.token for one in found], tokens[1:], "the tokens of prompt_logprobs")
    equal([c for c in chunks[1:] if c.prompt_logprobs is not None], [], "later chunks with them")
    context = rig.context()
    for token, one in zip(tokens, found, strict=False):
        context.decode_one(token)
        row = context.logits().astype(np.float64)
        row -= row.max()
        row -= np.log(np.exp(row).sum())
        equal(len(one.top), 2, "how many likeliest tokens are reported")
        gap = max(abs(one.logprob - row[one.token]), abs(one.top[0][1] - row.max()))
        that(gap <= 2 * rig.tolerance + 1e-5, f"a prompt token's log-probability is {gap:.3g} off")


class _Slow:
    """A processor that takes its time."""

    def apply(self, logits: Any) -> Any:
        """Wait."""
        time.sleep(0.06)
        return logits


@law("CANCEL-13", tier="session", since="1.2")
def check_timeouts(rig: Rig) -> None:
    """A decode that runs out of time ends with "timeout" and keeps what it generated.

    A call without a first token raises CallTimeoutError in time; asked again, it goes on.
    """
    text = rig.passage(8)
    session = rig.session()
    session.ensure_prefix(text)
    chunks = list(
        session.decode(timeout=0.15, processors=[_Slow()], temperature=0, ignore_eos=True)
    )
    equal(chunks[-1].finish_reason, "timeout", "finish_reason")
    shown = generated(chunks)
    that(0 < len(shown) < 6, f"{len(shown)} tokens of 60 ms each in 150 ms")  # noqa: PLR2004
    prompt = rig.tokenizer.encode(text)
    equal(session.explain_context().resident_tokens, len(prompt) + len(shown), "resident tokens")
    rig.follows(prompt, [*shown, *greedy(session, 3)], "a text that goes on after its timeout")
    slow = rig.session(n_batch=8, n_ubatch=8)
    long = rig.tokens(rig.n_ctx - 40)
    n_held, started = None, time.monotonic()
    try:
        slow.ensure_prefix(long, timeout=0.001)
    except CallTimeoutError as error:
        n_held = error.resident_tokens
        that(error.elapsed_ms >= 1, f"elapsed_ms is {error.elapsed_ms} of 1")
        that(n_held < len(long), "the call had done all of its work")
    took = time.monotonic() - started
    that(took < LATE_S, f"a call with a timeout of a millisecond took {took:.1f} s")
    status = slow.ensure_prefix(long)
    if n_held is not None:
        equal(status.reused_tokens, n_held, "tokens reused when asked again")
    rig.follows(long, greedy(slow, 3), "after a timeout")
