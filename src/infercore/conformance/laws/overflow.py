"""A window that is full."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infercore.conformance.expect import equal, raises, that
from infercore.conformance.law import law
from infercore.conformance.rig import generated, greedy
from infercore.errors import ContextOverflowError

if TYPE_CHECKING:
    from infercore.conformance.rig import Rig


@law("OVER-1")
def check_overflow_changes_nothing(rig: Rig) -> None:
    """Tokens that do not fit raise ContextOverflowError before anything changes."""
    context = rig.context(n_ctx=32)
    context.decode(rig.tokens(20))
    with rig.unchanged(context):
        error = raises(ContextOverflowError, lambda: context.decode(rig.tokens(13)), "13 more")
    facts = (error.stage, error.resident_tokens, error.additional_tokens, error.n_ctx)
    equal(facts, ("decode", 20, 13, 32), "stage, resident, additional and n_ctx of the error")


@law("OVER-2")
def check_the_last_place_is_used(rig: Rig) -> None:
    """The window can be filled to its last place and takes no more."""
    tokens = rig.tokens(33)
    context = rig.context(n_ctx=32)
    context.decode(tokens[:31])
    context.decode_one(tokens[31])
    rig.near(context.logits(), rig.cold(tokens[:32]), "logits of a full window")
    equal((context.n_past(), context.n_free()), (32, 0), "n_past and n_free")
    with rig.unchanged(context):
        raises(ContextOverflowError, lambda: context.decode_one(tokens[32]), "one more")


@law("OVER-3")
def check_the_window_asked_for(rig: Rig) -> None:
    """The window asked for is the one enforced, whatever the engine pads it to."""
    for n_ctx in (33, 50):
        context = rig.context(n_ctx=n_ctx)
        equal(context.n_ctx, n_ctx, "n_ctx")
        error = raises(
            ContextOverflowError,
            lambda c=context, n=n_ctx: c.decode(rig.tokens(n + 1)),
            f"{n_ctx + 1} tokens",
        )
        equal(error.n_ctx, n_ctx, "n_ctx of the error")
        context.decode(rig.tokens(n_ctx))


@law("OVER-4")
def check_eval_overflow_changes_nothing(rig: Rig) -> None:
    """An eval that does not fit drops nothing."""
    context = rig.context(n_ctx=32)
    context.decode(rig.tokens(20))
    with rig.unchanged(context):
        more = rig.tokens(23)
        raises(ContextOverflowError, lambda: context.eval(more, 10), "eval beyond the end")


@law("OVER-5", needs="multi_sequence")
def check_batch_overflow_changes_nothing(rig: Rig) -> None:
    """A batch that does not fit changes nothing."""
    tokens = rig.tokens(40)
    context = rig.context(n_ctx=32)
    context.decode(tokens[:30])
    with rig.unchanged(context):
        raises(
            ContextOverflowError,
            lambda: context.decode_batch([(t, (0,), False) for t in tokens[:3]]),
            "a batch of 3 into 2 places",
        )


@law("OVER-6")
def check_room_comes_back(rig: Rig) -> None:
    """Removing tokens makes room again."""
    tokens = rig.tokens(32)
    context = rig.context(n_ctx=32)
    context.decode(rig.tokens(32))
    context.clear()
    context.decode(tokens)
    rig.near(context.logits(), rig.cold(tokens), "a window filled a second time")


@law("OVER-7", tier="session")
def check_prefix_overflow(rig: Rig) -> None:
    """A prefix that does not fit raises at stage "prefix", and the old one stands."""
    session, text = rig.session(n_ctx=48), rig.passage(10)
    session.ensure_prefix(text)
    before = session.explain_context()
    error = raises(ContextOverflowError, lambda: session.ensure_prefix(rig.story), "a long prefix")
    equal((error.stage, error.n_ctx), ("prefix", 48), "stage and n_ctx")
    equal(session.explain_context(), before, "the report afterwards")
    rig.follows(rig.tokenizer.encode(text), greedy(session, 4), "after a prefix overflow")


@law("OVER-8", tier="session")
def check_suffix_overflow(rig: Rig) -> None:
    """A suffix that does not fit raises at stage "suffix" and changes nothing."""
    session, text, suffix = rig.session(n_ctx=64), rig.passage(10), " " + rig.passage(5)
    session.ensure_prefix(text)
    session.prefill_suffix(suffix)
    before = session.explain_context()
    error = raises(ContextOverflowError, lambda: session.prefill_suffix(rig.story), "a long suffix")
    equal((error.stage, error.n_ctx), ("suffix", 64), "stage and n_ctx")
    equal(session.explain_context(), before, "the report afterwards")
    rig.follows(rig.tokenizer.encode(text + suffix), greedy(session, 4), "after the overflow")


@law("OVER-9", tier="session")
def check_decode_overflow(rig: Rig) -> None:
    """A decode without room for one token raises at stage "decode"."""
    session = rig.session(n_ctx=24)
    session.ensure_prefix(rig.passage(8))
    list(session.decode(temperature=0, ignore_eos=True))
    before = session.explain_context()
    error = raises(ContextOverflowError, lambda: list(session.decode(max_tokens=1)), "no room")
    equal((error.stage, error.n_ctx), ("decode", 24), "stage and n_ctx")
    equal(session.explain_context(), before, "the report afterwards")


@law("OVER-10", tier="session")
def check_truncation_is_told(rig: Rig) -> None:
    """overflow="truncate" drops the oldest suffix tokens and reports every one of them."""
    session, text = rig.session(n_ctx=64, overflow="truncate"), rig.passage(8)
    session.ensure_prefix(text)
    long = " " + rig.passage(80)
    ids = rig.tokenizer.encode(text + long)
    status = session.prefill_suffix(long)
    stands, dropped = status.prefix_tokens, list(status.truncated_tokens)
    equal(len(ids) - len(dropped), status.resident_tokens, "resident tokens")
    held = rig.inner(session).tokens()[: status.resident_tokens]
    equal(held[:stands] + dropped + held[stands:], ids, "held and dropped tokens together")


@law("OVER-11", tier="session", needs="shift")
def check_shifting_is_told(rig: Rig) -> None:
    """overflow="shift" goes on past the window, keeps the prefix, and reports what it dropped."""
    session = rig.session(n_ctx=40, overflow="shift")
    text = rig.passage(8)
    n = session.ensure_prefix(text).prefix_tokens
    chunks = list(session.decode(max_tokens=70, temperature=0, ignore_eos=True))
    gone = [token for chunk in chunks for token in chunk.shifted_out]
    tokens = generated(chunks)
    equal((len(tokens), chunks[-1].finish_reason), (70, "length"), "the stream")
    held = rig.inner(session).tokens()
    equal(held[:n], rig.tokenizer.encode(text), "the prefix")
    there = len(gone) + len(held) - n
    that(there >= len(tokens) - rig.in_pool, "tokens that were shown are neither held nor dropped")
    equal(gone + held[n:], tokens[:there], "dropped and held tokens together")
    that(len(held) <= 40, f"{len(held)} tokens are held")  # noqa: PLR2004


@law("OVER-12", needs="multi_sequence")
def check_windows_of_sequences(rig: Rig) -> None:
    """Each of several sequences has the window n_ctx_seq; it is n_ctx // n_seq_max or shared."""
    context = rig.two(n_ctx=64)
    shared = bool(context.effective.get("kv_unified"))
    n = context.n_ctx_seq
    equal(n, 64 if shared else 32, "n_ctx_seq")
    context.decode(rig.tokens(20), seq_id=0)
    room = 64 - 20 if shared else 32
    equal(context.n_free(1), room, "n_free of the other sequence")
    _fill(rig, context, room)


def _fill(rig: Rig, context: Any, room: int) -> None:
    with rig.unchanged(context):
        raises(
            ContextOverflowError,
            lambda: context.decode(rig.tokens(room + 1), seq_id=1),
            f"{room + 1} tokens into {room} places",
        )
    context.decode(rig.tokens(room), seq_id=1)
    equal(context.n_free(1), 0, "n_free of a full sequence")
