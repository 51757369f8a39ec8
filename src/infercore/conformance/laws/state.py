"""Saving what a context holds, and bringing it back."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from infercore.conformance.expect import equal, raises, that
from infercore.conformance.law import law
from infercore.errors import ContextOverflowError, SnapshotError, UnsupportedFeatureError

if TYPE_CHECKING:
    from infercore.conformance.rig import Rig


def _holding(rig: Rig, tokens: list[int], **fields: Any) -> Any:
    context = rig.context(**fields)
    context.decode(tokens)
    return context


def damaged(data: bytes) -> list[bytes]:
    """Return copies of ``data`` that are cut or have a byte changed."""
    cut = [b"", b"x", data[:-1], data + b"x", data[: len(data) // 2]]
    size = len(data)  # the last place but one lies before the digests of a snapshot: data alone
    places = (0, 9, 40, size // 2, max(0, size - 72), size - 1)
    return cut + [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in places]


@law("STATE-1", needs="sequence_state")
def check_saved_sequence_continues(rig: Rig) -> None:
    """A sequence saved here continues in another context as it does here."""
    tokens, more = rig.tokens(10), rig.tokens(3)
    data = _holding(rig, tokens).save_sequence(0)
    other = rig.context()
    other.load_sequence(0, data)
    equal((other.tokens(), other.n_past()), (tokens, 10), "what was restored")
    other.decode(more)
    rig.near(other.logits(), rig.cold(tokens + more), "the restored sequence, continued")


@law("STATE-2", needs="sequence_state")
def check_logits_come_back(rig: Rig) -> None:
    """The last logits come back with a sequence, so that sampling can go on at once."""
    context = _holding(rig, rig.tokens(8))
    row = context.logits().copy()
    data = context.save_sequence(0)
    other = rig.context()
    other.load_sequence(0, data)
    rig.same_bits(other.logits(), row, "the restored logits")


@law("STATE-3", needs="sequence_state")
def check_restore_replaces(rig: Rig) -> None:
    """A restored sequence replaces what was held; it is not added to it."""
    tokens, more = rig.tokens(6), rig.tokens(2)
    data = _holding(rig, tokens).save_sequence(0)
    other = _holding(rig, rig.tokens(15))
    other.load_sequence(0, data)
    equal((other.tokens(), other.n_past()), (tokens, 6), "what was restored")
    other.decode(more)
    rig.near(other.logits(), rig.cold(tokens + more), "the restored sequence, continued")


@law("STATE-4", needs="sequence_state")
def check_restore_into_another_sequence(rig: Rig) -> None:
    """A sequence can be restored into another one; its neighbour stays."""
    tokens, neighbour, more = rig.tokens(7), rig.tokens(5), rig.tokens(2)
    data = _holding(rig, tokens).save_sequence(0)
    if not rig.context().capabilities.multi_sequence:
        rig.leave("there is only one sequence")
    expected = rig.cold(tokens + more)
    for unified in (None, True, False):  # what was saved may come from cells of another kind
        fields = {} if unified is None else {"kv_unified": unified}
        with contextlib.suppress(UnsupportedFeatureError):
            context = rig.context(n_seq_max=3, n_ctx=3 * rig.n_ctx, **fields)
            context.decode(neighbour, seq_id=0)
            context.load_sequence(1, data)
            equal((context.tokens(0), context.tokens(1)), (neighbour, tokens), "both sequences")
            data = context.save_sequence(1)
            context.decode(more, seq_id=1)
            rig.near(context.logits(), expected, f"restored, with kv_unified={unified}")
            context.load_sequence(2, data)
            context.decode(more, seq_id=2)
            rig.near(context.logits(), expected, f"restored again, with kv_unified={unified}")
    last = rig.context()
    last.load_sequence(0, data)
    last.decode(more)
    rig.near(last.logits(), expected, "restored where there is one sequence")


@law("STATE-5", needs="sequence_state")
def check_damaged_state_is_refused(rig: Rig) -> None:
    """Damaged state raises SnapshotError and changes nothing."""
    context = _holding(rig, rig.tokens(8))
    data = context.save_sequence(0)
    with rig.unchanged(context):
        for bad in damaged(data):
            raises(SnapshotError, lambda d=bad: context.load_sequence(0, d), "damaged state")
    context.decode(rig.tokens(2))


@law("STATE-6", needs="sequence_state")
def check_state_of_another_kind_is_refused(rig: Rig) -> None:
    """The state of a context is not accepted as that of a sequence, or the other way round."""
    context = _holding(rig, rig.tokens(5))
    data = context.save_sequence(0)
    whole = context.save_state() if context.capabilities.state else None
    with rig.unchanged(context):
        if whole is not None:
            raises(SnapshotError, lambda: context.load_sequence(0, whole), "a context's state")
            raises(SnapshotError, lambda: context.load_state(data), "a sequence's state")
        raises(SnapshotError, lambda: context.load_sequence(0, "text"), "text as state")


@law("STATE-7", needs="state")
def check_whole_state_comes_back(rig: Rig) -> None:
    """The state of a context brings every sequence back."""
    a, b, more = rig.tokens(6), rig.tokens(8), rig.tokens(2)
    many = rig.context().capabilities.multi_sequence
    context = rig.two() if many else rig.context()
    context.decode(a, seq_id=0)
    if many:
        context.decode(b, seq_id=1)
    data = context.save_state()
    other = rig.two() if many else rig.context()
    other.decode(rig.tokens(11))
    other.load_state(data)
    equal([other.tokens(s) for s in range(other.n_seq_max)], [a, b] if many else [a], "restored")
    other.decode(more, seq_id=0)
    rig.near(other.logits(), rig.cold(a + more), "a restored sequence, continued")


@law("STATE-8", needs="sequence_state")
def check_restore_that_does_not_fit(rig: Rig) -> None:
    """State that does not fit the window raises ContextOverflowError, and changes nothing."""
    data = _holding(rig, rig.tokens(40)).save_sequence(0)
    small = _holding(rig, rig.tokens(4), n_ctx=32)
    with rig.unchanged(small):
        error = raises(
            ContextOverflowError, lambda: small.load_sequence(0, data), "state that is too long"
        )
    equal((error.stage, error.n_ctx), ("restore", 32), "stage and n_ctx of the error")


@law("STATE-9", needs="sequence_state")
def check_positions_follow_a_restore(rig: Rig) -> None:
    """After a restore, a tail can be removed and replaced as usual, or the removal is refused.

    Where layers look back over a window, behind it and within it.
    """
    _check_tails_of_windows(rig)
    tokens, other_end = rig.tokens(10), rig.tokens(3)
    data = _holding(rig, tokens).save_sequence(0)
    context = _holding(rig, rig.tokens(3))
    context.load_sequence(0, data)
    if context.seq_remove(0, 7, -1):
        context.decode(other_end)
        rig.near(context.logits(), rig.cold(tokens[:7] + other_end), "after a removed tail")
    else:
        equal(context.tokens(), tokens, "tokens after a refused removal")


def _check_tails_of_windows(rig: Rig) -> None:
    window = rig.model.info.sliding_window or 0
    n = min(3 * window, rig.n_ctx - 8)
    if n <= window:
        return
    tokens = rig.tokens(n)
    for fields in ({}, {"swa_full": True}):
        with contextlib.suppress(UnsupportedFeatureError):
            _check_moved_tails(rig, tokens, n_ctx=n + 64, **fields)
        with contextlib.suppress(UnsupportedFeatureError):
            source = _holding(rig, tokens, **fields)
            for whole in (False, True):
                context = rig.context(**fields)
                for end in (n - 2, window + 3, window - 1, 2):
                    if whole:
                        context.load_state(source.save_state())
                    else:
                        context.load_sequence(0, source.save_sequence(0))
                    _check_tail(rig, context, tokens, 0, end)
            context.load_sequence(0, source.save_sequence(0))
            if source.seq_remove(0, 9, 20) and context.seq_remove(0, 9, 20):
                _check_same(rig, source, context, "what stands behind a hole in a restored window")
            _check_emptied(rig, context, tokens, window + 3, **fields)
            if context.capabilities.multi_sequence and context.capabilities.state:
                _check_tails_of_three(rig, tokens, window, **fields)


def _check_tails_of_three(rig: Rig, tokens: list[int], window: int, **fields: Any) -> None:
    source = _holding(rig, tokens, **fields)
    first, second = (rig.context(n_seq_max=3, n_ctx=3 * rig.n_ctx, **fields) for _ in "12")
    first.load_sequence(0, source.save_sequence(0))
    if first.capabilities.kv_copy != "none":
        first.seq_copy(0, 1)
        _check_tail(rig, first, tokens, 1, window + 3)
    for seq_id in range(3):  # what was restored once is restored again
        first.load_sequence(seq_id, source.save_sequence(0))
    second.load_state(first.save_state())
    for seq_id, end in enumerate((len(tokens) - 2, 2, window + 3)):
        _check_tail(rig, second, tokens, seq_id, end)


def _check_emptied(rig: Rig, context: Any, tokens: list[int], end: int, **fields: Any) -> None:
    """A sequence that was restored and is empty again loses a tail wherever a fresh one does."""
    fresh = _holding(rig, tokens, **fields)
    data = fresh.save_sequence(0)
    expected = fresh.seq_remove(0, end, -1)
    for empty in (context.clear, lambda: context.seq_remove(0)):
        context.load_sequence(0, data)
        empty()
        context.decode(tokens)
        equal(context.seq_remove(0, end, -1), expected, "whether a tail is removed after a restore")


def _check_moved_tails(rig: Rig, tokens: list[int], **fields: Any) -> None:
    """A tail of a restored text that went on and was moved is removed as where it was evaluated."""
    n, more = len(tokens), rig.tokens(20)
    for end in (n - 5, n + 6):
        contexts = [_holding(rig, tokens, **fields), rig.context(**fields)]
        if not contexts[0].capabilities.kv_shift:
            return
        contexts[1].load_sequence(0, contexts[0].save_sequence(0))
        gone = []
        for context in contexts:
            context.decode(more)
            context.seq_shift(0, 0, -1, 9)
            gone.append(context.seq_remove(0, end + 9, -1))
        if all(gone):
            _check_same(rig, contexts[0], contexts[1], f"a moved text, cut at {end} of {n}")


def _check_same(rig: Rig, one: Any, other: Any, what: str) -> None:
    tokens = rig.tokens(4)
    for context in (one, other):
        context.decode(tokens)
    rig.near(other.logits(), one.logits(), what)


def _check_tail(rig: Rig, context: Any, tokens: list[int], seq_id: int, end: int) -> None:
    """What stands from ``end`` on is removed and replaced, or nothing is removed."""
    n, other_end = len(tokens), rig.tokens(3)
    try:
        gone = context.seq_remove(seq_id, end, n if end % 2 else -1)
    except UnsupportedFeatureError:
        gone = False
    equal(context.n_past(seq_id), end if gone else n, "n_past after a removal")
    context.decode(other_end, seq_id=seq_id)
    kept = tokens[:end] if gone else tokens
    rig.near(context.logits(), rig.cold(kept + other_end), f"{end} of {n} tokens")


@law("STATE-10", needs="sequence_state")
def check_saving_changes_nothing(rig: Rig) -> None:
    """Saving changes nothing: not the tokens, not the logits, not what follows."""
    tokens, more = rig.tokens(9), rig.tokens(2)
    context = _holding(rig, tokens)
    with rig.unchanged(context):
        context.save_sequence(0)
    context.decode(more)
    rig.near(context.logits(), rig.cold(tokens + more), "after saving")


@law("STATE-11", needs="sequence_state")
def check_an_empty_sequence_is_saved(rig: Rig) -> None:
    """An empty sequence or context can be saved, and restores as empty."""
    data = rig.context().save_sequence(0)
    context = _holding(rig, rig.tokens(5))
    context.load_sequence(0, data)
    equal((context.n_past(), context.tokens()), (0, []), "what was restored")
    if context.capabilities.state:
        context.decode(rig.tokens(4))
        context.load_state(rig.context().save_state())
        equal((context.n_past(), context.tokens()), (0, []), "an empty context, restored")


@law("STATE-12", needs="sequence_state")
def check_state_of_another_cache_type_is_refused(rig: Rig) -> None:
    """State of a context with another type of KV cache is refused, and changes nothing."""
    kinds = rig.context().capabilities.kv_types
    own = rig.context().effective.get("type_k")
    other = next((kind for kind in ("f16", "f32") if kind in kinds and kind != own), None)
    if other is None:
        rig.leave("there is one type of KV cache only")
    data = _holding(rig, rig.tokens(6), type_k=other, type_v=other).save_sequence(0)
    context = _holding(rig, rig.tokens(4))
    with rig.unchanged(context):
        raises(SnapshotError, lambda: context.load_sequence(0, data), f"state of type {other}")


@law("STATE-26", needs="sequence_state", since="1.2")
def check_the_size_of_a_state_is_that_of_what_is_saved(rig: Rig) -> None:
    """The reported size of a sequence's state is the size that is saved; asking changes nothing."""
    tokens, more = rig.tokens(6), rig.tokens(30)
    context = _holding(rig, tokens)
    told, saved = context.seq_state_size(0), len(context.save_sequence(0))
    that(0 < told <= saved, f"{told} bytes told, {saved} saved")
    equal(context.tokens(), tokens, "the tokens after asking")
    context.decode(more)
    rig.near(context.logits(), rig.cold(tokens + more), "logits after asking")
    grown = context.seq_state_size(0) - told
    other = len(context.save_sequence(0)) - saved
    that(
        abs(grown - other) <= _HEADER, f"by {len(more)} tokens it grows {grown} bytes, not {other}"
    )
    if context.capabilities.kv_remove == "any":
        context.seq_remove(0, 1, 25)
        told, saved = context.seq_state_size(0), len(context.save_sequence(0))
        that(0 < told <= saved, f"{told} bytes told with a hole, {saved} saved")


_HEADER = 1024  # bytes, more than what the ids of so many tokens take
