"""Forks that part, move and are cut at the edges of blocks, beside texts that never forked."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from infercore.conformance import programs
from infercore.conformance.authors import accepted
from infercore.conformance.expect import that
from infercore.conformance.law import law
from infercore.errors import ContextOverflowError, UnsupportedFeatureError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infercore.conformance.rig import Rig

_N_CTX = 128
"""Tokens of each sequence, which every rig has."""

_PARTED = (
    # Who goes back takes other tokens than it had: the other's stay.
    (
        "decode 0 40 0 last; copy 0 1 -1 -1; remove 0 36 -1; decode 0 8 90 last; "
        "one 1 60; decode 1 5 70 last; one 0 80"
    ),
    (
        "decode 0 40 0 last; copy 0 1 -1 -1; remove 1 36 -1; decode 1 8 90 last; "
        "one 0 60; decode 0 5 70 last; one 1 80"
    ),
    (
        "decode 0 40 0 last; copy 0 1 -1 -1; one 1 60; remove 0 20 -1; one 0 90; save 0 1; "
        "one 1 61; load 0 1; one 1 62; one 0 91"
    ),
    # Each is on its own by the time one of them is cut in what both share.
    "decode 0 40 0 last; copy 0 1 -1 -1; decode 1 50 40 last; remove 1 3 8; one 1 100; one 0 101",
    (
        "decode 0 70 0 last; copy 0 1 -1 -1; decode 1 20 80 last; remove 1 3 8; "
        "remove 1 40 50; one 1 100; one 0 101"
    ),
)
_MOVED = (
    # A single token between the copy and the move, so that all is known about the copy.
    "decode 0 70 0 last; copy 0 1 -1 -1; one 1 100; shift 1 0 -1 5; one 1 101; one 0 102",
    "decode 0 70 0 last; copy 0 1 -1 -1; one 1 100; shift 1 33 -1 5; one 1 101; one 0 102",
    # A part in the middle moves; what stands behind it in the same block stays.
    "decode 0 40 0 last; remove 0 15 20; copy 0 1 -1 -1; shift 1 10 15 4; one 1 100; one 0 101",
    "decode 0 40 0 last; remove 0 2 10; copy 0 1 -1 -1; divide 1 10 20 2; one 1 100; one 0 101",
)


@law("KV-35", needs="multi_sequence", since="1.2")
def check_forks_at_the_edges_of_blocks(rig: Rig) -> None:
    """Sequences that were copied, went their ways and are cut or moved are as if never copied.

    At the edges of blocks and beside them, whichever of both goes back, and whether they share
    cells or not. What an engine cannot do with shared cells it refuses.
    """
    parts = []
    for p0 in (16, 32, 64):
        for p1 in (p0 + 16, p0 + 21, 90):
            copied = f"decode 0 90 0 last; copy 0 1 {p0} {p1}; one 1 120"
            parts.append(f"{copied}; remove 0 {p1} -1; remove 0 0 {p0}; one 0 120; one 1 121")
    for unified in (True, False):
        fields = accepted(rig, {"n_seq_max": 2, "n_ctx": 2 * _N_CTX, "kv_unified": unified})
        _run(rig, fields, [*_PARTED, *_MOVED, *parts])


@law("KV-36", needs="kv_remove_any", since="1.2")
def check_holes_at_the_edges_of_blocks(rig: Rig) -> None:
    """A hole of whole blocks behind another one is as the same hole made in pieces.

    So is a text whose end was removed and added to over and over beside a hole.
    """
    before = ("remove 0 3 8; ", "remove 0 3 8; remove 0 20 21; ", "")
    edges = ((32, 64), (64, 96), (16, 48), (48, 64), (32, 96))
    holes = [
        f"decode 0 110 0 last; {first}remove 0 {p0} {p1}; one 0 200; decode 0 4 210 last"
        for first in before
        for p0, p1 in edges
    ]
    again = "; ".join(f"decode 0 20 {50 + 20 * i} last; remove 0 40 -1" for i in range(5))
    _run(rig, {"n_ctx": _N_CTX}, holes)
    _run(rig, {"n_ctx": 64}, [f"decode 0 40 0 last; remove 0 10 30; {again}; decode 0 5 7 last"])


def _run(rig: Rig, fields: dict[str, object], steps: Sequence[str]) -> None:
    opened = programs.Program(fields=fields, steps=())
    for text in steps:
        programs.check(rig, programs.Program.read(f"{opened}; {text}"))


@law("KV-37", needs="kv_shift", since="1.2")
def check_many_forks_after_a_change(rig: Rig) -> None:
    """Many forks that part are right, also where threads were changed before.

    They then have more cells among them than the first had room for, or that is refused.
    """
    tokens, more = rig.tokens(70), rig.tokens(8)
    try:
        context = rig.context(n_seq_max=8, n_ctx=96, kv_unified=True)
    except UnsupportedFeatureError:
        rig.leave("sequences do not share a window here")
    with contextlib.suppress(UnsupportedFeatureError):
        context.set_threads(1, 1)
    context.decode(tokens)
    forks = {}
    with contextlib.suppress(ContextOverflowError):
        for seq_id in range(1, 6):
            context.seq_copy(0, seq_id)
            delta = _moved(context, seq_id)
            context.decode_one(more[seq_id], seq_id=seq_id)
            forks[seq_id] = delta, context.logits().copy()
    that(forks, "there is no room for one fork and a token behind it")
    for seq_id, (delta, row) in forks.items():
        alone = rig.context()
        alone.decode(tokens)
        if delta:
            alone.seq_shift(0, 0, -1, delta)
        alone.decode_one(more[seq_id])
        rig.near(row, alone.logits(), f"fork {seq_id}, moved by {delta}")
    context.decode_one(more[0], seq_id=0)
    rig.near(context.logits(), rig.cold([*tokens, more[0]]), "what was forked")


def _moved(context: Any, seq_id: int) -> int:
    """Move a fork by its number; return by how much it was: 0 where shared cells stay."""
    try:
        context.seq_shift(seq_id, 0, -1, seq_id)
    except UnsupportedFeatureError:
        return 0
    return seq_id
