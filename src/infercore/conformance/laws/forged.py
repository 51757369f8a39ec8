"""Saved state that was forged: it is whole by its checksums, and is not what an engine saved."""

from __future__ import annotations

import re
import struct
from functools import partial
from typing import TYPE_CHECKING, Any

from infercore.conformance.expect import equal, that
from infercore.conformance.law import law
from infercore.engine import blob
from infercore.errors import SnapshotError, UnsupportedFeatureError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from infercore.conformance.rig import Rig

_NUMBERS = {
    "no number": struct.pack("<f", float("nan")),
    "an infinity": struct.pack("<f", float("inf")),
    "a number of 1e30": struct.pack("<f", 1e30),
    "no number in half precision": b"\x00\x7e" * 2,
}
_WORDS = (0xFFFF_FFFF, 0x7FFF_FFFF, 1)
_N_WORDS = 24
_N_NUMBERS = 16


@law("STATE-31", needs="sequence_state", since="1.2")
def check_forged_state(rig: Rig) -> None:
    """Forged state is refused and leaves nothing, or is taken and spoils nothing later.

    Its header and checksums are right, its payload is not. Other sequences stay as they are.
    """
    tokens, neighbour, more = rig.tokens(12), rig.tokens(7), rig.tokens(3)
    expected = rig.cold(tokens)
    context = rig.two() if rig.context().capabilities.multi_sequence else rig.context()
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
