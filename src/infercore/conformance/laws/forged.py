"""Saved state that was forged: it is whole by its checksums, and is not what an engine saved."""

from __future__ import annotations

import re
import struct
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.conformance.expect import equal, raises, that
from infercore.conformance.law import law
from infercore.conformance.laws.formats import accepted_types
from infercore.engine import blob
from infercore.errors import InvalidStateError, SnapshotError, UnsupportedFeatureError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from infercore.conformance.rig import Rig

_NUMBERS = {
    "no number": struct.pack("<f", float("nan")),
    "an infinity": struct.pack("<f", float("inf")),
    "a number of 3e38": struct.pack("<f", 3e38),
    "no number in half precision": b"\x00\x7e" * 2,
}
_WORDS = (0xFFFF_FFFF, 0x7FFF_FFFF, 1)
_SIGN, _N_BYTES = b"\x80", 16
"""The last byte of a number below 0, and how many are tried one after another: all of a cell."""
_N_WORDS = 24
_N_NUMBERS = 16
_LONG = 700
_EVERYWHERE = tuple((share / 20, 0, b"\xff" * 4) for share in range(1, 20))
_IN_A_BLOCK = tuple((s, at, b"\xff" * 2) for s in (0.08, 0.75) for at in range(0, 34, 2))
"""No number, of any width; at all places of a block of 34 bytes, the largest that is in use.

In keys and in values, also where the keys take an eighth of what the values do.
"""


@law("STATE-31", needs="sequence_state", since="1.2")
def check_forged_state(rig: Rig) -> None:
    """Forged state is refused and leaves nothing, or is taken and spoils nothing later.

    Its header and checksums are right, its payload is not. Other sequences stay as they are.
    """
    tokens, neighbour, more = rig.tokens(12), rig.tokens(7), rig.tokens(3)
    expected = rig.cold(tokens)
    several = rig.context().capabilities.multi_sequence
    context = rig.two() if several else rig.context()
    others = range(1, context.n_seq_max)
    for seq_id in others:
        context.decode(neighbour, seq_id=seq_id)
    context.decode(tokens, seq_id=0)
    for what, data in _forged(rig, lambda c: c.save_sequence(0), context.save_sequence(0)):
        _load(context, partial(context.load_sequence, 0, data), what)
        context.seq_remove(0)
        equal([context.tokens(s) for s in others], [neighbour] * len(others), f"{what}: others")
        context.decode(tokens, seq_id=0)
        rig.near(context.logits(), expected, f"logits after a sequence with {what}")
    for seq_id in others:
        context.decode(more, seq_id=seq_id)
        rig.near(context.logits(), rig.cold(neighbour + more), "another sequence, continued")
    if context.capabilities.state:
        for what, data in _forged(rig, lambda c: c.save_state(), context.save_state()):
            _load(context, partial(context.load_state, data), what)
            context.clear()
            context.decode(tokens, seq_id=0)
            rig.near(context.logits(), expected, f"logits after state with {what}")
    if several and context.capabilities.kv_remove != "none":
        _check_beside(rig, neighbour)


def _check_beside(rig: Rig, neighbour: list[int]) -> None:
    """What a forged text leaves behind is read by none beside it: a long one, one of each type."""
    n = min(_LONG, rig.model.info.n_ctx_train or _LONG)
    context = rig.context(n_seq_max=2, n_ctx=2 * n + 64, n_batch=n)
    check_left(rig, neighbour, n, _EVERYWHERE, context)
    for fields in accepted_types(rig):
        if "flash_attn" not in fields:  # with which an engine may read nothing that is masked
            context = rig.context(**fields, n_seq_max=2, n_ctx=2 * rig.n_ctx)
            check_left(rig, neighbour, 12, _IN_A_BLOCK, context, f"{fields}: ")


def check_left(
    rig: Rig,
    neighbour: list[int],
    n: int,
    places: Sequence[tuple[float, int, bytes]],
    context: Any,
    told: str = "",
) -> None:
    context.decode(rig.tokens(n), seq_id=0)
    context.decode(neighbour, seq_id=1)
    header, payload, row = blob.unpack(context.save_sequence(0))
    for share, beyond, number in places:
        at = (int(share * len(payload)) & ~3) + beyond
        what = f"{told}no number at {at} of {len(payload)}"
        data = blob.pack(dict(header), _with(bytes(payload), at, number), bytes(row))
        _load(context, partial(context.load_sequence, 0, data), what)
        context.seq_remove(0)
        context.decode_one(neighbour[0], seq_id=1)
        that(np.isfinite(context.logits()).all(), f"{what}: another text gives no numbers")


def _load(context: Any, load: Callable[[], object], what: str) -> None:
    try:
        load()
    except SnapshotError as error:
        equal(error.state_after, "cleared", f"what the refusal of {what} says of the state")
        equal(list(context.tokens(0)), [], f"the tokens after {what} was refused")
        that(len(str(error)) > 40, f"the refusal of {what} says only {error}")  # noqa: PLR2004
    that(context.n_past(0) >= 0, f"with {what} the next position is {context.n_past(0)}")


def _forged(rig: Rig, save: Callable[[Any], bytes], data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield what is wrong, and saved state with it."""
    header, payload, row = blob.unpack(data)
    for what, other in (*_changed(rig, bytes(payload)), *_of_another_type(rig, save)):
        yield what, blob.pack(dict(header), other, bytes(row))


def _changed(rig: Rig, payload: bytes) -> Iterator[tuple[str, bytes]]:
    size = len(payload)
    for what, number in _NUMBERS.items():
        for share in (0.5, 0.75, 0.97):
            yield f"{what} at {share} of it", _with(payload, int(share * size) & ~3, number)
        yield f"{what} at its end", payload[:-4] + number
    for at in (*range(0, 4 * _N_WORDS, 4), *range(4 * _N_WORDS, min(size // 4, 800), 68)):
        word = _WORDS[at // 4 % len(_WORDS)]
        yield f"{word:#x} at {at}", _with(payload, at, struct.pack("<I", word))
    texts = [*re.finditer(rb"[ -~]{16,}", payload[:2048])]
    for at in range(texts[0].end(), texts[0].end() + 4 * _N_WORDS, 4) if texts else ():
        yield f"{_WORDS[0]:#x} at {at}, behind text", _with(payload, at, b"\xff" * 4)
    for found in [*re.finditer(rb"\d+", payload[:2048])][:_N_NUMBERS]:  # a header may be text
        for text in (b"-", b"9"):
            yield f"{text!r} at {found.start()}", _with(payload, found.start(), text)
    yield "its second half", payload[size // 2 :]  # what is cut at its end: STATE-32
    yield "more behind it", payload + bytes(64)
    yield "zeros", bytes(size)
    yield "noise", rig.random.randbytes(size)


def _with(payload: bytes, at: int, part: bytes) -> bytes:
    return payload[:at] + part + payload[at + len(part) :]


def _of_another_type(rig: Rig, save: Callable[[Any], bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield state of contexts with other settings, which fits them alone."""
    own = rig.context().effective.get("type_k")
    for kind in ("f32", "f16", "bf16"):
        if kind != own:
            try:
                other = rig.context(type_k=kind, type_v=kind)
            except UnsupportedFeatureError:
                continue
            other.decode(rig.tokens(12))
            yield f"K and V of {kind}", bytes(blob.unpack(save(other))[1])


# -- what is left of it ----------------------------------------------------------------------------


@law("STATE-34", needs="sequence_state", since="1.2")
def check_what_forged_state_leaves(rig: Rig) -> None:
    """Forged state takes no room for good, and spoils no text that is begun later.

    Wherever one number is changed, also in the state of texts that share tokens. What is true is
    taken: of a long text, and of none.
    """
    _check_room(rig)
    _check_long(rig)
    _check_more(rig)
    if not rig.context().capabilities.multi_sequence:
        return
    _check_empty(rig)
    if rig.context().capabilities.state:
        fields = {"n_seq_max": 3, "n_ctx": rig.n_ctx}
        check_shared(rig, rig.context(**fields), lambda text: rig.cold(text, **fields))


def _check_room(rig: Rig) -> None:
    """Where a forged text was removed, a text that fills the whole window has room."""
    context, tokens = rig.context(), rig.tokens(12)
    text = rig.story_at(0, context.n_ctx)
    expected = rig.cold(text)
    context.decode(tokens)
    header, payload, row = blob.unpack(context.save_sequence(0))
    start = rig.random.randrange(32, 64)
    for at in range(start, start + _N_BYTES):
        data = blob.pack(dict(header), _with(bytes(payload), at, _SIGN), bytes(row))
        what = f"{_SIGN!r} at {at} of {len(payload)}"
        _load(context, partial(context.load_sequence, 0, data), what)
        context.seq_remove(0)
        context.decode(text)
        rig.near(context.logits(), expected, f"a whole window, after {what}")
        context.clear()


def _check_more(rig: Rig) -> None:
    """State with something behind it is no state."""
    context = rig.context()
    context.decode(rig.tokens(12))
    header, payload, row = blob.unpack(context.save_sequence(0))
    data = blob.pack(dict(header), bytes(payload) + bytes(16), bytes(row))
    raises(SnapshotError, lambda: context.load_sequence(0, data), "state with 16 bytes behind it")


def _check_long(rig: Rig) -> None:
    n = min(_LONG, (rig.model.info.n_ctx_train or _LONG) - 8)
    tokens, fields = rig.story_at(0, n), {"n_ctx": n + 8, "n_batch": n}
    source, target = rig.context(**fields), rig.context(**fields)
    source.decode(tokens)
    target.load_sequence(0, source.save_sequence(0))
    for context in (source, target):
        context.decode_one(tokens[0])
    rig.near(target.logits(), np.array(source.logits()), f"a text of {n} tokens, restored")


def _check_empty(rig: Rig) -> None:
    """What is saved of no text leaves none, whatever form the cache has that it comes to."""
    tokens = rig.tokens(9)
    for one, other in ((True, False), (False, True)):
        try:
            source, target = rig.two(kv_unified=one), rig.two(kv_unified=other)
            source.decode(tokens, seq_id=1)
            data = source.save_sequence(0)
        except (UnsupportedFeatureError, InvalidStateError):
            continue
        for context in (source, target):
            context.decode(tokens, seq_id=0)
            context.load_sequence(0, data)
            equal(context.n_past(0), 0, f"tokens of no text, saved with kv_unified={one}")
            context.decode(tokens, seq_id=0)
            rig.near(context.logits(), rig.cold(tokens), "a text after none was restored")


def check_shared(
    rig: Rig, context: Any, cold: Callable[[list[int]], Any], told: str = "", n_places: int = 24
) -> None:
    """What is forged of the state of texts that share tokens spoils none that is begun later.

    ``context`` is of three sequences; ``cold`` returns what its model computes of a text.
    """
    tokens, more, fresh = rig.tokens(9), rig.tokens(5), rig.tokens(4)
    full = rig.story_at(0, context.n_ctx // 3)
    expected, filled = cold(fresh), cold(full)
    context.decode(tokens)
    if context.capabilities.kv_copy != "none":
        context.seq_copy(0, 1)
    for seq_id in (0, 1):
        context.decode(more, seq_id=seq_id)
    header, payload, row = blob.unpack(context.save_state())
    forged = [(i * len(payload) // n_places & ~3, b"\xff" * 4) for i in range(1, n_places)]
    start = rig.random.randrange(64, 128)
    for at, part in (*forged, *((start + i, _SIGN) for i in range(_N_BYTES))):
        data = blob.pack(dict(header), _with(bytes(payload), at, part), bytes(row))
        what = f"{told}{part.hex()} at {at} of {len(payload)} of texts that share tokens"
        _load(context, partial(context.load_state, data), what)
        context.seq_remove(2)
        context.decode(fresh, seq_id=2)
        rig.near(context.logits(), expected, f"another text, begun after {what}")
        for seq_id in range(3) if part == _SIGN else ():
            context.seq_remove(seq_id)
        for seq_id in range(3) if part == _SIGN else ():
            context.decode(full, seq_id=seq_id)
            rig.near(context.logits(), filled, f"all of the room, after {what}")
