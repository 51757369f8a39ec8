"""Removing, copying and moving what is held."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.conformance.expect import equal, raises, that
from infercore.conformance.law import law
from infercore.conformance.requirements import TAIL, copying_parts
from infercore.errors import (
    InvalidInputError,
    InvalidPositionError,
    OutputNotAvailableError,
    UnsupportedFeatureError,
)

if TYPE_CHECKING:
    from infercore.conformance.rig import Rig


@law("KV-1", needs="kv_remove")
def check_removed_tail(rig: Rig) -> None:
    """A tail removed and replaced by other tokens gives what a fresh context gives.

    As far back as is declared, wherever steps of the engine ended.
    """
    _check_declared_reach(rig)
    tokens, other = rig.tokens(14), rig.tokens(5)
    context = rig.context()
    context.decode(tokens)
    that(context.seq_remove(0, 14 - TAIL, -1) is True, "removing a tail did not return True")
    kept = tokens[: 14 - TAIL]
    equal((context.tokens(), context.n_past()), (kept, len(kept)), "what is left")
    context.decode(other)
    rig.near(context.logits(), rig.cold(kept + other), "logits after a removed tail")


def _check_declared_reach(rig: Rig) -> None:
    info = rig.model.info
    window, n = info.sliding_window or 0, min(400, info.n_ctx_train - 20)
    if rig.context().capabilities.kv_remove != "rollback":
        return
    tokens, other = rig.tokens(n), rig.tokens(5)
    for n_ubatch in {16, max(16, 256 - window)}:  # 256: to which engines round their caches up
        context = rig.context(n_ctx=n + 20, n_batch=n_ubatch, n_ubatch=n_ubatch)
        context.decode(tokens)
        kept = tokens[: n - context.capabilities.max_rollback]
        that(context.seq_remove(0, len(kept), -1), f"{n - len(kept)} tokens are not taken back")
        context.decode(other)
        expected = rig.cold(kept + other, n_ctx=n + 20)
        rig.near(context.logits(), expected, f"logits after {n - len(kept)} tokens were taken back")


@law("KV-2", needs="kv_remove_any")
def check_removed_hole(rig: Rig) -> None:
    """Cutting a hole removes its tokens and leaves every other position where it was."""
    tokens = rig.tokens(10)
    context = rig.context()
    context.decode(tokens)
    that(context.seq_remove(0, 3, 6) is True, "removing a hole did not return True")
    equal(context.tokens(), tokens[:3] + tokens[6:], "the tokens left")
    equal((context.n_past(), context.n_resident()), (10, 7), "n_past and n_resident")
    equal((context.seq_pos_min(), context.seq_pos_max()), (0, 9), "first and last position")


@law("KV-3")
def check_whole_sequence_removed(rig: Rig) -> None:
    """A whole sequence can always be removed; what follows is as in a fresh context."""
    tokens = rig.tokens(6)
    context = rig.context()
    context.decode(rig.tokens(9))
    that(context.seq_remove(0) is True, "removing all did not return True")
    equal((context.n_past(), context.tokens()), (0, []), "what is left")
    context.decode(tokens)
    rig.same_bits(context.logits(), rig.cold(tokens), "logits after removing all")


@law("KV-4", needs="kv_remove")
def check_removal_takes_the_logits(rig: Rig) -> None:
    """After a removal the old logits are gone."""
    context = rig.context()
    context.decode(rig.tokens(8))
    context.seq_remove(0, 6, -1)
    raises(OutputNotAvailableError, context.logits, "logits after a removal")


@law("KV-5", needs="kv_remove")
def check_removing_what_is_not_there(rig: Rig) -> None:
    """Removing positions that are not held returns True and changes nothing."""
    context = rig.context()
    context.decode(rig.tokens(5))
    with rig.unchanged(context):
        for p0, p1 in ((5, -1), (7, 9), (2, 2)):
            that(context.seq_remove(0, p0, p1) is True, f"seq_remove(0, {p0}, {p1})")


@law("KV-6")
def check_removal_that_cannot_be(rig: Rig) -> None:
    """A part is removed as asked, or False is returned and nothing is changed."""
    context = rig.context()
    tokens = rig.tokens(9)
    for p0, p1 in ((1, 4), (8, -1), (3, -1), (0, 2), (0, 8)):
        context.clear()
        context.decode(tokens)
        before = rig.look(context)
        if context.seq_remove(0, p0, p1):
            end = 9 if p1 == -1 else p1
            equal(context.tokens(), tokens[:p0] + tokens[end:], f"tokens without [{p0}, {p1})")
        else:
            rig.still(before, context, f"after seq_remove(0, {p0}, {p1}) said False")


@law("KV-7", needs="kv_copy")
def check_a_copy_continues_alike(rig: Rig) -> None:
    """A copied sequence and its source both continue as a fresh context does."""
    tokens, a, b = rig.tokens(9), rig.tokens(3), rig.tokens(4)
    context = rig.two()
    context.decode(tokens)
    context.seq_copy(0, 1)
    equal((context.tokens(1), context.n_past(1)), (tokens, 9), "the copy")
    context.decode(a, seq_id=0)
    rig.near(context.logits(), rig.cold(tokens + a), "the source, continued")
    context.decode(b, seq_id=1)
    rig.near(context.logits(), rig.cold(tokens + b), "the copy, continued")


@law("KV-8", needs="kv_copy")
def check_a_copy_is_apart(rig: Rig) -> None:
    """Removing from the source, or adding to it, leaves the copy as it was."""
    tokens, more = rig.tokens(8), rig.tokens(3)
    context = rig.two()
    context.decode(tokens)
    context.seq_copy(0, 1)
    context.decode(more, seq_id=0)
    equal((context.tokens(1), context.n_past(1)), (tokens, 8), "the copy of a longer source")
    context.seq_remove(0)
    equal((context.tokens(1), context.n_past(1)), (tokens, 8), "the copy of a removed source")
    context.decode(more, seq_id=1)
    rig.near(context.logits(), rig.cold(tokens + more), "the copy, continued alone")


@law("KV-9", needs="kv_copy")
def check_a_copy_replaces(rig: Rig) -> None:
    """A copy replaces what the target held."""
    tokens, more = rig.tokens(8), rig.tokens(2)
    context = rig.two()
    context.decode(rig.tokens(5), seq_id=1)
    context.decode(tokens, seq_id=0)
    context.seq_copy(0, 1)
    equal(context.tokens(1), tokens, "the target")
    context.decode(more, seq_id=1)
    rig.near(context.logits(), rig.cold(tokens + more), "the target, continued")


@law("KV-10", needs="kv_copy_any")
def check_a_part_is_copied(rig: Rig) -> None:
    """A copied part is that part, and continues from its end, in each context that declares it."""
    contexts = [copying_parts(rig)]
    for unified in (True, False):
        with contextlib.suppress(UnsupportedFeatureError):
            contexts.append(rig.two(kv_unified=unified))
    for context in contexts:
        if context.capabilities.kv_copy == "any":
            _check_copied_part(rig, context)


def _check_copied_part(rig: Rig, context: Any) -> None:
    tokens, more = rig.tokens(9), rig.tokens(3)
    context.decode(tokens)
    context.seq_copy(0, 1, 0, 5)
    equal((context.tokens(1), context.n_past(1)), (tokens[:5], 5), "the copied part")
    context.decode(more, seq_id=1)
    rig.near(context.logits(), rig.cold(tokens[:5] + more), "the copied part, continued")
    equal(context.tokens(0), tokens, "the source")


@law("KV-11", needs="kv_copy")
def check_keep_only_one(rig: Rig) -> None:
    """seq_keep removes all other sequences."""
    tokens, more = rig.tokens(7), rig.tokens(2)
    context = rig.two()
    context.decode(tokens)
    context.seq_copy(0, 1)
    context.seq_keep(1)
    equal((context.n_past(0), context.tokens(1)), (0, tokens), "what is left")
    context.decode(more, seq_id=1)
    rig.near(context.logits(), rig.cold(tokens + more), "the kept sequence, continued")


@law("KV-12")
def check_clear(rig: Rig) -> None:
    """Clear removes every sequence and the logits, and the context starts afresh."""
    tokens = rig.tokens(6)
    context = rig.context()
    context.decode(rig.tokens(10))
    context.clear()
    equal((context.n_past(), context.tokens()), (0, []), "what is left")
    equal(context.n_free(), rig.n_ctx, "n_free")
    raises(OutputNotAvailableError, context.logits, "logits after clear")
    context.decode(tokens)
    rig.same_bits(context.logits(), rig.cold(tokens), "logits after clear")
    if not context.capabilities.multi_sequence:
        return
    both = rig.two()
    for seq_id in (0, 1):
        both.decode(rig.tokens(5), seq_id=seq_id)
    both.clear()
    for seq_id in (1, 0):
        equal((both.n_past(seq_id), both.tokens(seq_id)), (0, []), f"what {seq_id} still holds")
        both.decode(tokens, seq_id=seq_id)
        rig.near(both.logits(), rig.cold(tokens), f"logits of sequence {seq_id} after clear")


@law("KV-13", needs="shift")
def check_hole_closed_by_a_shift(rig: Rig) -> None:
    """After a hole is cut and the rest moved into it, positions have no gap."""
    tokens, more = rig.tokens(10), rig.tokens(2)
    context = rig.context()
    context.decode(tokens)
    context.seq_remove(0, 2, 5)
    context.seq_shift(0, 5, -1, -3)
    equal((context.n_past(), context.n_resident()), (7, 7), "n_past and n_resident")
    equal((context.seq_pos_min(), context.seq_pos_max()), (0, 6), "first and last position")
    context.decode(more)
    equal(context.tokens(), tokens[:2] + tokens[5:] + more, "the tokens held")


@law("KV-39", needs="kv_shift", since="1.2")
def check_parts_moved_past_others(rig: Rig) -> None:
    """After the first tokens are moved past the last, the next token follows the highest position.

    So too where a part is copied in front of what another sequence holds, and after a restore.
    """
    tokens, context = rig.tokens(11), rig.context()
    context.decode(tokens[:10])
    context.seq_shift(0, 0, 2, 20)
    _check_ends(context, 0, [*tokens[2:10], *tokens[:2]], (2, 21))
    saved = context.save_sequence(0) if context.capabilities.sequence_state else None
    context.decode_one(tokens[10])
    _check_ends(context, 0, [*tokens[2:10], *tokens[:2], tokens[10]], (2, 22))
    row = np.array(context.logits())
    oracle = rig.live_oracle()
    if oracle is not None:
        past, _ = oracle.append(oracle.nothing(), tokens[:10])
        moved = np.where(past.positions < 2, past.positions + 20, past.positions)  # noqa: PLR2004
        _, hidden = oracle.append(past.at(moved), tokens[10:])
        rig.near(row, oracle.logits(hidden)[-1], "logits behind a text whose first part was moved")
    if saved is not None:
        other = rig.context()
        other.load_sequence(0, saved)
        _check_ends(other, 0, [*tokens[2:10], *tokens[:2]], (2, 21))
        other.decode_one(tokens[10])
        rig.near(other.logits(), row, "logits behind a restored text whose first part was moved")
    can = context.capabilities
    if can.kv_copy != "any" or can.kv_remove != "any":
        return
    both = rig.two()
    both.decode(tokens[:10], seq_id=1)
    both.seq_remove(1, 0, 6)
    both.decode(tokens[:10])
    both.seq_copy(0, 1, 0, 6)
    _check_ends(both, 1, tokens[:10], (0, 9))
    both.decode_one(tokens[10], seq_id=1)
    _check_ends(both, 1, tokens, (0, 10))
    rig.near(both.logits(), rig.cold(tokens), "logits behind a first part that was copied")


def _check_ends(context: Any, seq_id: int, tokens: list[int], ends: tuple[int, int]) -> None:
    found = context.seq_pos_min(seq_id), context.seq_pos_max(seq_id)
    equal(found, ends, "first and last position")
    equal(context.n_past(seq_id), ends[1] + 1, "n_past")
    equal(context.tokens(seq_id), tokens, "the tokens held, by their positions")


_SCALINGS: tuple[dict[str, Any], ...] = (
    {},
    {"rope_freq_base": 5000.0},
    {"rope_scaling_type": "linear", "rope_freq_scale": 0.5},
    {"rope_scaling_type": "yarn", "rope_freq_scale": 0.25},
)


@law("KV-14", needs="kv_shift")
def check_shift_there_and_back(rig: Rig) -> None:
    """Moving positions up, or up and back again, leaves the results as they were.

    So with each base and scaling of rope with which a context moves them.
    """
    for fields in _SCALINGS:
        tokens, more = rig.tokens(9), rig.tokens(2)
        try:
            context = rig.context(**fields)
        except (InvalidInputError, UnsupportedFeatureError):
            if not fields:
                raise
            continue
        if fields and not context.capabilities.kv_shift:
            required = {"kv_shift", *fields} <= {*rig.require}
            that(not required, f"what the rig requires, to move tokens, is lost with {fields}")
            continue
        context.decode(tokens)
        context.seq_shift(0, 0, -1, 4)
        equal((context.seq_pos_min(), context.n_past()), (4, 13), "positions moved up")
        context.seq_shift(0, 0, -1, -4)
        equal((context.seq_pos_min(), context.n_past()), (0, 9), "positions moved back")
        context.decode(more)
        expected = rig.cold(tokens + more, **fields)
        rig.near(context.logits(), expected, f"logits after moving there and back, {fields}")
        context.clear()
        context.decode(tokens)
        context.seq_shift(0, 0, -1, 4)
        context.decode(more)
        rig.near(context.logits(), expected, f"logits behind a text that was moved, {fields}")


@law("KV-15", needs="kv_shift")
def check_shift_onto_what_is_held(rig: Rig) -> None:
    """A shift below 0, or onto a position that is held, is refused and changes nothing."""
    context = rig.context()
    context.decode(rig.tokens(8))
    with rig.unchanged(context):
        for p0, p1, delta in ((0, -1, -1), (4, -1, -2), (0, 4, 2)):
            raises(
                InvalidPositionError,
                lambda a=p0, b=p1, d=delta: context.seq_shift(0, a, b, d),
                f"seq_shift(0, {p0}, {p1}, {delta})",
            )


@law("KV-16", needs="kv_divide")
def check_divide(rig: Rig) -> None:
    """Divided positions move together; the tokens stay."""
    tokens = rig.tokens(8)
    context = rig.context()
    context.decode(tokens)
    context.seq_divide(0, 0, -1, 2)
    equal((context.n_past(), context.n_resident()), (4, 8), "n_past and n_resident")
    equal((context.seq_pos_min(), context.seq_pos_max()), (0, 3), "first and last position")
    equal(context.tokens(), tokens, "the tokens held")
    context.decode_one(tokens[0])
    equal(context.n_past(), 5, "n_past after one more token")


@law("KV-17")
def check_positions_of_an_empty_sequence(rig: Rig) -> None:
    """An empty sequence has next position 0 and first and last position -1."""
    context = rig.context()
    equal(
        (context.n_past(), context.seq_pos_min(), context.seq_pos_max(), context.n_resident()),
        (0, -1, -1, 0),
        "n_past, first, last, n_resident",
    )


@law("KV-18")
def check_room_is_counted(rig: Rig) -> None:
    """n_free falls with every token held and comes back with every one removed."""
    context = rig.context()
    equal(context.n_free(), rig.n_ctx, "n_free of an empty context")
    context.decode(rig.tokens(10))
    equal(context.n_free(), rig.n_ctx - 10, "n_free with 10 tokens")
    context.clear()
    equal(context.n_free(), rig.n_ctx, "n_free of a cleared context")


@law("KV-19", needs="multi_sequence")
def check_removing_all_sequences(rig: Rig) -> None:
    """seq_remove of sequence -1 removes from all of them."""
    context = rig.two()
    context.decode(rig.tokens(5), seq_id=0)
    context.decode(rig.tokens(6), seq_id=1)
    that(context.seq_remove(-1) is True, "seq_remove(-1) did not return True")
    equal((context.n_past(0), context.n_past(1)), (0, 0), "n_past of both sequences")


@law("KV-20", needs="multi_sequence")
def check_removal_leaves_the_other_sequence(rig: Rig) -> None:
    """Removing one sequence leaves the other."""
    a, more = rig.tokens(7), rig.tokens(2)
    context = rig.two()
    context.decode(a, seq_id=0)
    context.decode(rig.tokens(5), seq_id=1)
    context.seq_remove(1)
    equal((context.tokens(0), context.n_past(1)), (a, 0), "the other sequence")
    context.decode(more, seq_id=0)
    rig.near(context.logits(), rig.cold(a + more), "the other sequence, continued")


@law("KV-21")
def check_the_engine_holds_what_is_told(rig: Rig) -> None:
    """The engine itself, seen past the API, holds as many tokens as the context says."""
    observe = rig.observe
    if observe is None:
        rig.leave("the rig has no observe")
    context = rig.context()
    tokens = rig.tokens(12)
    context.decode(tokens)
    context.seq_remove(0, 9, -1)
    seen = observe(context, 0)
    if seen.resident is None:
        rig.leave("the rig's observe does not tell the tokens held")
    equal(seen.resident, context.n_resident(), "tokens that the engine holds")
    if seen.tokens is not None:
        equal(list(seen.tokens), context.tokens(), "the engine's own tokens")


@law("KV-22", needs="kv_remove")
def check_growing_and_shrinking(rig: Rig) -> None:
    """A sequence shortened and extended many times behaves like a fresh one.

    So it does after more has been removed than fits into its window.
    """
    context = rig.context()
    held: list[int] = []
    for _ in range(6):
        more = rig.tokens(rig.random.randint(1, 8))
        context.decode(more)
        held += more
        n = rig.random.randint(0, min(TAIL, len(held) - 1))
        if n:
            context.seq_remove(0, len(held) - n, -1)
            del held[len(held) - n :]
        equal(context.tokens(), held, "the tokens held")
    last = rig.tokens(1)
    context.decode(last)
    rig.near(context.logits(), rig.cold(held + last), "logits in the end")
    small, held = rig.context(n_ctx=24), rig.tokens(8)
    small.decode(held)
    for _ in range(10):
        small.decode(rig.tokens(TAIL))
        small.seq_remove(0, len(held), -1)
    small.decode(last)
    rig.near(small.logits(), rig.cold(held + last), "logits in a small window")


@law("KV-23", needs="kv_divide", since="1.1")
def check_what_a_divide_moves_is_computed_there(rig: Rig) -> None:
    """A token moved up, divided and moved back gives the logits it gave: its keys move along."""
    tokens, more = rig.tokens(2), rig.tokens(3)
    context = rig.context()
    if not context.capabilities.kv_shift:
        rig.leave("positions cannot be moved back")
    context.decode(tokens)
    context.seq_shift(0, 0, -1, 8)
    context.seq_divide(0, 8, 9, 2)
    equal((context.seq_pos_min(), context.seq_pos_max()), (4, 9), "first and last position")
    context.seq_shift(0, 4, 5, -4)
    context.seq_shift(0, 9, 10, -8)
    context.decode(more)
    rig.near(context.logits(), rig.cold(tokens + more), "logits after moving, dividing and back")


@law("KV-32", needs="kv_remove_any", since="1.2")
def check_holes_of_copies_of_a_full_window(rig: Rig) -> None:
    """Copies of a text that nearly fills the window go on right, each with a hole of its own.

    So does the text that they were copied from, and a copy that was left whole.
    """
    kinds = rig.context().capabilities
    if not kinds.multi_sequence or kinds.kv_copy == "none":
        rig.leave("sequences are not copied")
    holes = ((0, 0), (3, 40), (100, 101), (110, 170), (0, 0))
    tokens, more = rig.tokens(rig.n_ctx - 2 * len(holes)), rig.tokens(2)
    context, alone = rig.context(n_seq_max=len(holes), kv_unified=True), rig.context()
    context.decode(tokens)
    for seq_id in range(1, len(holes)):
        context.seq_copy(0, seq_id)
    for seq_id, (p0, p1) in enumerate(holes):
        context.seq_remove(seq_id, p0, p1)
    for seq_id, (p0, p1) in enumerate(holes):
        context.decode(more, seq_id=seq_id)
        alone.clear()
        alone.decode(tokens)
        alone.seq_remove(0, p0, p1)
        alone.decode(more)
        equal(context.tokens(seq_id), alone.tokens(), f"tokens of sequence {seq_id}")
        what = f"sequence {seq_id} without its positions from {p0} to {p1}"
        rig.near(context.logits(), np.array(alone.logits()), what)
