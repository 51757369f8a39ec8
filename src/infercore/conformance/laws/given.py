"""Programs written by hand: pairs of steps that seldom meet by chance, and long ones."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from infercore.conformance import programs
from infercore.conformance.law import law
from infercore.conformance.laws.oracle import window
from infercore.errors import InvalidInputError, UnsupportedFeatureError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infercore.conformance.rig import Rig
    from infercore.values.info import Capabilities

_CHANGES = (
    "decode 0 30 5 last; shift 0 12 -1 9",
    "decode 0 30 5 last; shift 0 0 -1 40; shift 0 0 -1 -40",
    "decode 0 30 5 last; shift 0 14 -1 20; divide 0 34 -1 2",
    "decode 0 30 5 last; remove 0 7 11; remove 0 15 17",
    "decode 0 30 5 last; remove 0 0 8",
    "decode 0 9 5 all; one 0 77; remove 0 3 5; shift 0 5 -1 -2",
)
_CHANGES_OF_THREE = (
    "decode 0 9 5 last; decode 1 14 90 last; decode 2 4 33 last",
    "decode 2 30 5 last; copy 2 1 0 -1; decode 1 3 60 last; shift 2 12 -1 9",
    "decode 1 20 5 last; copy 1 2 4 15; remove 1 6 9; decode 0 3 8 none",
    "decode 0 20 5 last; copy 0 1 0 -1; copy 0 2 0 -1; remove 1 9 -1; remove 2 15 -1",
    "decode 0 28 5 last; copy 0 1 0 -1; copy 0 2 0 -1; remove 0 19 -1; remove 1 21 -1",
)
_PUT_OFF = (  # where each has cells of its own, engines put copies and moves off
    "decode 1 20 5 last; save 0 1; decode 0 30 60 last; copy 0 1 0 -1; clear; load 0 1; one 1 40",
    "decode 0 20 5 last; copy 0 1 0 -1; save_all 0; clear; load_all 0; one 1 40; one 0 40",
    "decode 1 20 5 last; decode 0 9 70 last; save_all 0; remove 1 0 -1; copy 0 1 0 -1; load_all 0",
    "decode 1 9 5 last; save_all 0; clear; one 0 6; copy 0 1 0 1; shift 0 0 1 2; clear; load_all 0",
    "decode 0 20 5 last; copy 0 1 0 -1; shift 0 5 -1 7; save 0 0; remove 0 0 -1; load 0 0",
)
_NEEDS: dict[str, Callable[[Capabilities], object]] = {
    "shift": lambda can: can.kv_shift,
    "divide": lambda can: can.kv_divide,
    "copy": lambda can: can.kv_copy != "none",
    "threads": lambda can: can.live_threads,
    "embed": lambda can: can.embeddings,
    "adapters": lambda can: can.lora,
    "save_all": lambda can: can.state,
}
_ENDS = "one {0} 40; decode {0} 5 300 all"


def _run(rig: Rig, texts: Sequence[str], *, n_ctx: int, n_seq_max: int = 1, **more: Any) -> None:
    """Run each program in contexts with that window for each sequence."""
    fields: dict[str, Any] = {"n_ctx": n_ctx * n_seq_max, **more}
    if n_seq_max > 1:
        fields["n_seq_max"] = n_seq_max
    can = rig.context().capabilities
    for text in texts:
        told = text if can.logits_all else text.replace(" all", " last")
        steps = programs.Program.read(f"; {told}").steps
        if not any(str(step[0]) in _NEEDS and not _NEEDS[step[0]](can) for step in steps):
            programs.check(rig, programs.Program(fields=fields, steps=steps))


@law("STATE-28", needs="sequence_state", since="1.2")
def check_state_saved_right_after_a_change(rig: Rig) -> None:
    """A sequence saved right after it was moved, cut or copied is restored just as it was."""
    ends = _ENDS.format(0)
    texts = [f"{change}; save 0 0; remove 0 0 -1; load 0 0; {ends}" for change in _CHANGES]
    if rig.context().capabilities.state:
        texts += [f"{change}; save_all 0; clear; load_all 0; {ends}" for change in _CHANGES]
    _run(rig, texts, n_ctx=rig.n_ctx)
    if not rig.context().capabilities.multi_sequence:
        return
    every = "; ".join(_ENDS.format(seq_id) for seq_id in range(3))
    texts = [f"{change}; save 0 1; load 0 0; load 0 2; {every}" for change in _CHANGES_OF_THREE]
    if rig.context().capabilities.state:
        texts += [
            f"{change}; save_all 0; clear; load_all 0; {every}" for change in _CHANGES_OF_THREE
        ]
    _run(rig, texts, n_ctx=rig.n_ctx, n_seq_max=3)
    with contextlib.suppress(UnsupportedFeatureError):
        rig.two(kv_unified=False).close()
        both = "; ".join(_ENDS.format(seq_id) for seq_id in range(2))
        copied = "decode 0 20 5 last; save 0 0; decode 1 9 60 last; one 1 8; copy 1 0 0 -1"
        texts = [f"{copied}; load 0 {seq_id}; {both}" for seq_id in range(2)]
        texts += [f"{steps}; {both}; one 1 41" for steps in _PUT_OFF]
        _run(rig, texts, n_ctx=rig.n_ctx, n_seq_max=2, kv_unified=False)
        texts = [f"{change}; save 0 1; load 0 0; load 0 2; {every}" for change in _CHANGES_OF_THREE]
        _run(rig, texts, n_ctx=rig.n_ctx, n_seq_max=3, kv_unified=False)


@law("KV-28", since="1.2")
def check_whole_windows_are_changed(rig: Rig) -> None:
    """A window's worth of tokens is cleared, cut, moved, copied and kept whole."""
    _check_moves_in_long_windows(rig)
    n_ctx = window(rig)
    n = n_ctx - 60
    ends = _ENDS.format(0)
    texts = [
        f"decode 0 {n} 5 last; clear; decode 0 30 900 last; {ends}",
        f"decode 0 {n} 5 last; remove 0 9 {n - 9}; decode 0 30 900 last; {ends}",
        f"decode 0 {n} 5 last; remove 0 {n // 3} -1; {ends}",
        f"decode 0 {n} 5 last; remove 0 0 40; shift 0 40 -1 -40; {ends}",
    ]
    _run(rig, texts, n_ctx=n_ctx)
    if not rig.context().capabilities.multi_sequence:
        return
    both = f"{_ENDS.format(1)}; {ends}"
    texts = [
        f"decode 0 {n} 5 last; copy 0 1 0 -1; decode 1 40 900 last; {ends}; one 1 77",
        f"decode 0 {n} 5 last; decode 1 {n} 77 last; clear; decode 0 9 3 last; {both}",
        f"decode 0 {n} 5 last; decode 1 {n // 2} 77 last; keep 1; {both}",
    ]
    _run(rig, texts, n_ctx=n_ctx, n_seq_max=2)


def _check_moves_in_long_windows(rig: Rig) -> None:
    """Where a context with a long window says that it can move tokens, it can."""
    try:
        context = rig.context(n_ctx=2048, n_batch=64, n_ubatch=32)
    except (InvalidInputError, UnsupportedFeatureError):  # too long a window
        return
    if context.capabilities.kv_shift:
        tokens, more = rig.tokens(50), rig.tokens(2)
        context.decode(tokens)
        context.seq_shift(0, 0, -1, 7)
        context.decode(more)
        rig.near(context.logits(), rig.cold(tokens + more), "a moved text, continued")


@law("DEC-28", needs="multi_sequence", since="1.2")
def check_batches_of_one_token_each(rig: Rig) -> None:
    """Sequences of unequal length that go on by one token each, in any order, in one batch."""
    starts = "; ".join(f"decode {s} {n} {50 * s} last" for s, n in enumerate((9, 31, 2, 17)))
    turns = "batch q0123 w1111 7; batch q3120 w1011 90; batch q213 w001 40; batch q02 w11 3"
    _run(rig, [f"{starts}; {turns}; one 2 5; {turns}"], n_ctx=rig.n_ctx, n_seq_max=4)


_SET = ("threads 1", "embed 1", "warm", "threads 1; embed 1; warm", "adapters 50; adapters 0")
_HELD = "decode 0 9 5 last; decode 2 14 90 last; one 2 7; save 1 2; save_all 2"
_GO_ON = (
    "one 2 3; one 0 8; decode 1 4 33 last; batch q0212 w0111 60; load 1 3; one 3 11; load_all 2"
)


@law("KV-34", since="1.2")
def check_settings_that_change_in_the_midst(rig: Rig) -> None:
    """Other threads, adapters, embeddings and a warm-up leave what each sequence holds.

    Also what was saved before, and sequences that hold nothing.
    """
    can = rig.context().capabilities
    settings = [text for text in _SET if rig.adapter is not None or "adapters" not in text]
    if can.embeddings and not _gives_logits_beside_embeddings(rig):
        settings = [text.replace("embed 1; ", "") for text in settings if text != "embed 1"]
    for setting in settings:
        if can.multi_sequence and can.sequence_state and can.state:
            texts = [f"{_HELD}; {setting}; {_GO_ON}; one 2 5; one 0 6"]
            _run(rig, texts, n_ctx=rig.n_ctx, n_seq_max=4)
        else:
            _run(
                rig, [f"decode 0 9 5 last; {setting}; one 0 3; decode 0 5 7 last"], n_ctx=rig.n_ctx
            )


def _gives_logits_beside_embeddings(rig: Rig) -> bool:
    """Whether an engine computes both of this model at once, which it need not."""
    context = rig.context()
    try:
        context.set_embeddings(True)
        context.decode(rig.tokens(2))
        context.logits()
    except UnsupportedFeatureError:
        return False
    return True


_FORKED = (
    "decode 0 {n} 5 last; one 0 9; copy 0 1 0 -1; {change}; one 0 40; one 1 7; one 0 3; one 1 8"
)
_CHANGES_OF_FORKS = (
    "one 1 33; remove 0 5 8",
    "one 1 33; remove 1 2 3",
    "remove 0 1 2; remove 1 1 2",
    "remove 0 {last} -1",
    "remove 1 {last} -1; one 1 60; remove 1 {last} -1",
    "shift 0 8 -1 3",
    "one 1 33; shift 1 8 -1 3; remove 1 2 4",
)


@law("KV-38", needs="multi_sequence", since="1.2")
def check_single_tokens_after_changes_of_forks(rig: Rig) -> None:
    """After one of two sequences that share tokens is cut or moved, both continue token by token.

    Each single token follows another, from which an engine may have kept where the cells lie.
    """
    if rig.context().capabilities.kv_copy == "none":
        rig.leave("the backend copies no sequences")
    texts = [
        _FORKED.format(n=n, change=change.format(last=n - 1))
        for n in (20, 40)
        for change in _CHANGES_OF_FORKS
    ]
    _run(rig, texts, n_ctx=rig.n_ctx, n_seq_max=2)
