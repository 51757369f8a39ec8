"""What a stream shows, and how it ends."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.conformance.expect import equal, raises, that
from infercore.conformance.law import law
from infercore.conformance.rig import generated, greedy, joined
from infercore.conformance.texts import PIECES
from infercore.errors import SessionBusyError

if TYPE_CHECKING:
    from infercore.conformance.rig import Rig


class Forced:
    """A processor that lets one token after the other be chosen, then anything."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = list(tokens)

    def apply(self, logits: Any) -> Any:
        """Let only the next token be possible."""
        if not self._tokens:
            return logits
        forced = np.full_like(logits, -np.inf)
        forced[self._tokens.pop(0)] = 0
        return forced


class _Raising:
    def apply(self, _: Any) -> Any:
        raise ZeroDivisionError("a processor of the caller's failed")


def _session(rig: Rig, n: int = 10) -> tuple[Any, str]:
    session, text = rig.session(), rig.passage(n)
    session.ensure_prefix(text)
    return session, text


def _forced(session: Any, tokens: list[int], **fields: Any) -> list[Any]:
    asked = {"max_tokens": len(tokens), "temperature": 0, "ignore_eos": False, **fields}
    return list(session.decode(processors=[Forced(tokens)], **asked))


def _story(rig: Rig, n: int) -> list[int]:
    """Tokens of plain text that make text of their own when generated."""
    return rig.tokens(n)


@law("STREAM-1", tier="session")
def check_joined_text(rig: Rig) -> None:
    """The text of all chunks, joined, is the text of all their tokens."""
    session, _ = _session(rig)
    chunks = list(session.decode(max_tokens=40, temperature=1.2, seed=7))
    text = rig.tokenizer.decode(generated(chunks), skip_special=True)
    equal(joined(chunks), text, "the joined text")


@law("STREAM-2", tier="session")
def check_characters_arrive_whole(rig: Rig) -> None:
    """A character split over tokens is never broken and never replaced."""
    for piece in PIECES:
        session, _ = _session(rig, 4)
        tokens = rig.tokenizer.encode(piece, add_special=False, parse_special=False)
        chunks = _forced(session, tokens)
        equal(joined(chunks), piece, "the text of forced tokens")
        broken = [chunk.text for chunk in chunks if "\ufffd" in chunk.text]
        equal(broken, [], "chunks with a replacement character")


@law("STREAM-3", tier="session")
def check_stop_string_never_leaks(rig: Rig) -> None:
    """A stop string ends the text, and no part of it is shown, also when it spans tokens."""
    tokens = _story(rig, 16)
    whole = rig.tokenizer.decode(tokens)
    for start in range(2, len(whole) - 6, max(1, len(whole) // 8)):
        stop = whole[start : start + 5]
        session, _ = _session(rig, 4)
        chunks = _forced(session, tokens, stop=[stop])
        equal(joined(chunks), whole[: whole.index(stop)], f"the text before stop {stop!r}")
        equal(chunks[-1].finish_reason, "stop", "finish_reason")


@law("STREAM-4", tier="session")
def check_what_almost_stops_is_shown(rig: Rig) -> None:
    """Text that only began like a stop string is shown in the end."""
    tokens = _story(rig, 8)
    whole = rig.tokenizer.decode(tokens)
    session, _ = _session(rig, 4)
    chunks = _forced(session, tokens, stop=[whole[-3:] + "\x00never"])
    equal(joined(chunks), whole, "the text")
    equal(chunks[-1].finish_reason, "length", "finish_reason")


@law("STREAM-5", tier="session")
def check_stop_tokens(rig: Rig) -> None:
    """A stop token ends the text, and is neither shown nor resident."""
    tokens = list(dict.fromkeys(_story(rig, 30)))[:8]
    session, text = _session(rig, 4)
    chunks = _forced(session, tokens, stop_tokens=[tokens[5]])
    equal(generated(chunks), tokens[:5], "the tokens shown")
    equal(chunks[-1].finish_reason, "stop", "finish_reason")
    n = len(rig.tokenizer.encode(text)) + 5
    equal(session.explain_context().resident_tokens, n, "resident tokens")


@law("STREAM-6", tier="session")
def check_the_length_is_kept(rig: Rig) -> None:
    """max_tokens bounds the tokens, and only the last chunk has an end and usage."""
    session, _ = _session(rig)
    for n in (1, 9):
        chunks = list(session.decode(max_tokens=n, temperature=0, ignore_eos=True))
        equal(len(generated(chunks)), n, "tokens generated")
        equal(chunks[-1].finish_reason, "length", "finish_reason")
        equal(chunks[-1].usage.completion_tokens, n, "completion tokens")
        early = [c for c in chunks[:-1] if c.finish_reason is not None or c.usage is not None]
        equal(early, [], "chunks before the last with an end")


@law("STREAM-7", tier="session")
def check_the_window_ends_a_stream(rig: Rig) -> None:
    """A full window ends the stream with "context", with every place used."""
    session = rig.session(n_ctx=48)
    n = session.ensure_prefix(rig.passage(12)).prefix_tokens
    chunks = list(session.decode(temperature=0, ignore_eos=True))
    equal(chunks[-1].finish_reason, "context", "finish_reason")
    equal(len(generated(chunks)), 48 - n, "tokens generated")
    equal(session.explain_context().available_tokens, 0, "available tokens")


@law("STREAM-8", tier="session")
def check_the_end_of_generation(rig: Rig) -> None:
    """An end-of-generation token ends the stream with "eos"; it is not shown and not resident."""
    tokenizer = rig.tokenizer
    end = next((t for t in (tokenizer.eos, tokenizer.eot) if t is not None), None)
    if end is None:
        rig.leave("the vocabulary has no end token")
    tokens = _story(rig, 4)
    session, text = _session(rig, 4)
    chunks = _forced(session, [*tokens, end, *tokens], max_tokens=20)
    equal(generated(chunks), tokens, "the tokens shown")
    equal(chunks[-1].finish_reason, "eos", "finish_reason")
    n = len(tokenizer.encode(text)) + 4
    equal(session.explain_context().resident_tokens, n, "resident tokens")


@law("STREAM-9", tier="session")
def check_a_second_decode_continues(rig: Rig) -> None:
    """Generated tokens are resident: two decodes in a row give what one gives."""
    session, text = _session(rig)
    whole = greedy(session, 14)
    session.ensure_prefix(text)
    first = greedy(session, 6)
    second = greedy(session, 8)
    equal(first + second, whole, "tokens of two decodes")
    prompt = rig.tokenizer.encode(text)
    rig.follows(prompt, whole, "the whole")


@law("STREAM-10", tier="session")
def check_usage(rig: Rig) -> None:
    """Usage reports the seed, the counts, the time to the first token and the rate."""
    session, text = _session(rig)
    usage = list(session.decode(max_tokens=6, seed=11, ignore_eos=True))[-1].usage
    equal(usage.prompt_tokens, len(rig.tokenizer.encode(text)), "prompt tokens")
    equal((usage.completion_tokens, usage.seed), (6, 11), "completion tokens and seed")
    that((usage.time_to_first_token_ms or 0) > 0, "the time to the first token is not positive")
    that((usage.tokens_per_second or 0) > 0, "the rate is not positive")


@law("STREAM-11", tier="session")
def check_generate_is_the_joined_stream(rig: Rig) -> None:
    """Generate gives the text that the stream gives."""
    text = rig.passage(8)
    fields = {"max_tokens": 10, "temperature": 0}
    whole = rig.session().generate(text, **fields)
    session = rig.session()
    session.ensure_prefix("")
    session.prefill_suffix(text)
    equal(whole, joined(list(session.decode(**fields))), "the generated text")


@law("STREAM-12", tier="session")
def check_control_tokens_are_no_text(rig: Rig) -> None:
    """Control tokens are text only with special_text."""
    control = rig.tokenizer.bos
    if control is None or not rig.tokenizer.is_control(control):
        rig.leave("the vocabulary has no control token to generate")
    for shown in (False, True):
        session, _ = _session(rig, 4)
        chunks = _forced(session, [control, control], special_text=shown)
        name = rig.tokenizer.token_bytes(control).decode()
        equal(joined(chunks), 2 * name if shown else "", f"text with special_text={shown}")
        equal(generated(chunks), [control, control], "the tokens shown")


@law("STREAM-13", tier="session")
def check_logprobs(rig: Rig) -> None:
    """Logprobs report each token's natural-log probability and the likeliest tokens."""
    session, text = _session(rig)
    row = rig.cold(rig.tokenizer.encode(text)).astype(np.float64)
    row -= row.max() + np.log(np.exp(row - row.max()).sum())
    chunks = list(session.decode(max_tokens=5, temperature=0, logprobs=3, ignore_eos=True))
    steps = [step for chunk in chunks for step in chunk.logprobs or ()]
    equal([step.token for step in steps], generated(chunks), "tokens of the logprobs")
    for step in steps:
        equal(len(step.top), 3, "how many likeliest tokens are told")
        that(step.logprob <= 0, f"a logprob of {step.logprob}")
    gap = abs(steps[0].logprob - row[steps[0].token])
    that(gap <= max(2 * rig.tolerance, 1e-4), f"the first logprob is {gap:.3g} off")


@law("STREAM-14", tier="session")
def check_closing_a_stream(rig: Rig) -> None:
    """Closing the iterator keeps what was shown resident, and the session goes on from there."""
    session, text = _session(rig)
    whole = greedy(session, 12)
    for n in (0, 1, 5):
        session.ensure_prefix(text)
        stream = session.decode(max_tokens=12, temperature=0, ignore_eos=True)
        shown = generated([next(stream) for _ in range(n)])
        stream.close()
        stream.close()
        report = session.explain_context()
        equal(report.generated_tokens, len(shown), "generated tokens after closing")
        equal(shown + greedy(session, 12 - len(shown)), whole, "the tokens in the end")


@law("STREAM-15", tier="session")
def check_dropping_a_stream(rig: Rig) -> None:
    """Dropping the iterator frees the session."""
    session, text = _session(rig)
    stream = session.decode(max_tokens=10, temperature=0, ignore_eos=True)
    next(stream)
    del stream
    gc.collect()
    session.ensure_prefix(text)
    that(greedy(session, 3), "nothing was generated after a stream was dropped")


@law("STREAM-16", tier="session")
def check_an_open_stream_holds_the_session(rig: Rig) -> None:
    """While a stream is open, every other call but explain and cancel raises SessionBusyError."""
    session, text = _session(rig)
    stream = session.decode(max_tokens=10, temperature=0, ignore_eos=True)
    next(stream)
    for name, call in {
        "ensure_prefix": lambda: session.ensure_prefix(text),
        "prefill_suffix": lambda: session.prefill_suffix(" a"),
        "decode": lambda: list(session.decode(max_tokens=1)),
        "snapshot": session.snapshot,
        "fork": session.fork,
    }.items():
        raises(SessionBusyError, call, f"{name} while a stream is open")
    that(session.explain_context().resident_tokens > 0, "the report of a busy session")
    stream.close()


@law("STREAM-17", tier="session")
def check_a_processor_that_raises(rig: Rig) -> None:
    """What a caller's processor raises reaches the caller, and the session goes on."""
    session, text = _session(rig)
    raises(
        ZeroDivisionError,
        lambda: list(session.decode(max_tokens=3, processors=[_Raising()])),
        "a processor that raises",
    )
    session.ensure_prefix(text)
    rig.follows(rig.tokenizer.encode(text), greedy(session, 4), "after a processor raised")


@law("STREAM-18", tier="session")
def check_the_end_is_the_end(rig: Rig) -> None:
    """After its last chunk a stream has ended for good, and the session is free."""
    session, text = _session(rig)
    stream = session.decode(max_tokens=2, temperature=0, ignore_eos=True)
    list(stream)
    equal(list(stream), [], "chunks after the end")
    session.ensure_prefix(text)
