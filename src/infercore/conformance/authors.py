"""Drawing programs from a seed: phrases of a few steps, each possible where it stands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from infercore.conformance.programs import Program
from infercore.conformance.shadow import Shadow
from infercore.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from infercore.conformance.programs import Step
    from infercore.conformance.rig import Rig


SHORT = 120


@attrs.frozen(kw_only=True)
class Kinds:
    """The phrases that a program is made of, where they are possible, and its sizes.

    ``n_ctx`` is the window of one sequence (0 = the rig's), ``longest`` the most tokens of a step.
    """

    phrases: str
    n_seq_max: int = 1
    n_ctx: int = 0
    longest: int = SHORT


def draw(rig: Rig, kinds: Kinds, n_steps: int) -> Program:
    """Return a program of about ``n_steps`` steps, drawn from the rig's random numbers."""
    draw, n_ctx = rig.random, kinds.n_ctx or rig.n_ctx
    n_batch = draw.choice((5, 7, 16, 24, 33, 64, n_ctx))
    fields: dict[str, Any] = {
        "n_batch": n_batch,
        "n_ubatch": draw.choice((n_batch, n_batch, max(1, n_batch * 2 // 3), max(1, n_batch - 1))),
    }
    fields["n_ctx"] = kinds.n_seq_max * n_ctx
    if kinds.n_seq_max > 1:
        fields["n_seq_max"] = kinds.n_seq_max
        fields["kv_unified"] = draw.random() < 1 / 2
    fields = accepted(rig, fields)
    with rig.model.new_context(**rig.fields(**fields)) as context:
        author = Author(rig, context, kinds)
        return Program(fields=fields, steps=tuple(author.written(n_steps)))


def accepted(rig: Rig, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields without a layout of the cache that the engine does not have."""
    try:
        rig.model.new_context(**rig.fields(**fields)).close()
    except UnsupportedFeatureError:
        return {name: value for name, value in fields.items() if name != "kv_unified"}
    return fields


class Author:
    """Writes programs: phrases of a few steps each, that the shadow finds possible."""

    def __init__(self, rig: Rig, context: Any, kinds: Kinds) -> None:
        self._rig = rig
        self._kinds = kinds
        self._can = context.capabilities
        self._spans = hasattr(context, "decode_spans")
        self._n_batch = context.n_batch
        self._books = Shadow(rig, context, computes=False)
        self._draw: random.Random = rig.random
        self._steps: list[Step] = []

    def written(self, n_steps: int) -> Sequence[Step]:
        """Return the steps."""
        phrases = self._phrases()
        self._put(0)
        for _ in range(20 * n_steps):
            if len(self._steps) >= n_steps:
                break
            self._draw.choice(phrases)()
        for seq_id, past in enumerate(self._books.sequences):
            if len(past.tokens):
                self._add("one", seq_id, self._at())
        return self._steps

    def _phrases(self) -> list[Callable[[], None]]:
        """Return what the program is made of, often meant phrases more than once."""
        can, several = self._can, self._books.n_seq_max > 1
        # What a narrow cache has forgotten is counted in positions: it moves with them.
        moves = can.kv_remove in ("any", "suffix") and can.kv_shift
        possible = {
            "append": True,
            "singles": True,
            "cut": can.kv_remove != "none",
            "again": can.kv_remove != "none",
            "hole": can.kv_remove == "any",
            "head": can.kv_remove == "any",
            "shift": moves,
            "close": moves and can.kv_remove == "any",
            "divide": moves and can.kv_divide,
            "copy": several and can.kv_copy != "none",
            "batch": can.multi_sequence,
            "several": several and self._spans and can.multi_sequence,
            "through_bytes": can.sequence_state,
            "all_through_bytes": can.state,
            "switch": can.lora,
            "end": True,
        }
        names = [name for name in self._kinds.phrases.split() if possible[name]]
        return [getattr(self, f"_{name}") for name in names]

    # Each adds steps that can be taken where the program has come to.

    def _add(self, *step: Any) -> bool:
        name, *args = step
        if not self._books.allows(name, args):
            return False
        self._books.take(name, args)
        self._steps.append(step)
        return True

    def _at(self) -> int:
        return self._draw.randrange(10_000)

    def _any(self) -> int:
        """A sequence that holds something, if there is one."""
        held = [s for s, past in enumerate(self._books.sequences) if len(past.tokens)]
        return self._draw.choice(held or [0])

    def _size(self) -> int:
        """Return a number of tokens: small, around the batch size, or large."""
        near = self._n_batch + self._draw.choice((-1, 0, 1))
        longest = self._kinds.longest
        large = self._draw.randint(longest // 6, longest)
        small = (1, 2, self._draw.randint(3, 12), near, 2 * near)
        sizes = (*small, large) if longest <= SHORT else (1, near, large, large, large)
        return max(1, min(self._draw.choice(sizes), longest))

    def _put(self, seq_id: int) -> bool:
        modes = ("last", "last", "all", "none") if self._can.logits_all else ("last", "none")
        size, mode = self._size(), self._draw.choice(modes)
        return self._add("decode", seq_id, size, self._at(), mode)

    def _append(self) -> None:
        self._put(self._draw.randrange(self._books.n_seq_max))

    def _singles(self) -> None:
        seq_id = self._any()
        for _ in range(self._draw.randint(1, 4)):
            self._add("one", seq_id, self._at())

    def _place(self, seq_id: int) -> int:
        """Return a position of a sequence, its first and last ones more often than others."""
        past = self._books.sequences[seq_id]
        low, high = int(past.positions.min(initial=0)), past.end
        return self._draw.choice((low, low + 1, high - 1, self._draw.randint(low, max(low, high))))

    def _cut(self) -> None:
        seq_id = self._any()
        at = self._place(seq_id)
        if self._add("remove", seq_id, max(0, at), -1) and self._draw.random() < 1 / 2:
            self._add("one", seq_id, self._at())

    def _again(self) -> None:
        seq_id = self._any()
        past = self._books.sequences[seq_id]
        back = self._draw.randint(0, min(len(past.tokens), 2 * self._n_batch))
        self._add("eval", seq_id, back, self._size(), self._at())

    def _hole(self) -> int:
        """Make a hole, in most cases go on behind it; return its sequence."""
        seq_id = self._any()
        p0, p1 = sorted((self._place(seq_id), self._place(seq_id)))
        if p0 < p1:
            self._add("remove", seq_id, max(0, p0), p1)
            if self._draw.random() < 2 / 3:
                self._add("one", seq_id, self._at())
        return seq_id

    def _head(self) -> None:
        seq_id = self._any()
        self._add("remove", seq_id, 0, max(1, self._place(seq_id)))
        self._put(seq_id)

    def _close(self) -> None:
        """Make a hole and move what is behind it there."""
        seq_id = self._hole()
        positions = np.sort(self._books.sequences[seq_id].positions)
        gaps = np.flatnonzero(np.diff(positions, prepend=-1) > 1)
        if len(gaps):
            at = int(self._draw.choice(gaps.tolist()))
            width = int(positions[at] - (positions[at - 1] if at else -1) - 1)
            self._add("shift", seq_id, int(positions[at]), -1, -self._draw.randint(1, width))
            self._add("one", seq_id, self._at())

    def _shift(self) -> None:
        seq_id = self._any()
        at, delta = self._draw.choice((0, self._place(seq_id))), self._draw.randint(1, 40)
        if self._add("shift", seq_id, max(0, at), -1, self._draw.choice((delta, -delta))):
            self._draw.choice((self._singles, self._append, self._through_bytes))()
            self._add("one", seq_id, self._at())

    def _divide(self) -> None:
        seq_id = self._any()
        p0, p1 = sorted((self._place(seq_id), self._place(seq_id)))
        if self._add("divide", seq_id, max(0, p0), p1, self._draw.choice((2, 3))):
            self._add("one", seq_id, self._at())

    def _copy(self) -> None:
        source, target = self._any(), self._draw.randrange(self._books.n_seq_max)
        p0, p1 = -1, -1
        if self._can.kv_copy == "any" and self._draw.random() < 1 / 2:
            p0, p1 = sorted((max(0, self._place(source)), max(0, self._place(source))))
        if self._add("copy", source, target, p0, p1):
            for _ in range(2):  # by turns: neither may see what the other adds
                self._add("one", target, self._at())
                self._add("one", source, self._at())

    def _batch(self) -> None:
        n, n_seq = self._draw.randint(1, min(self._n_batch, 40)), self._books.n_seq_max
        order = "".join(str(self._draw.randrange(n_seq)) for _ in range(n))
        wanted = "".join(self._draw.choice("0011") for _ in range(n))
        self._add("batch", f"q{order}", f"w{wanted}", self._at())

    def _several(self) -> None:
        n_seq = self._books.n_seq_max
        seq_ids = self._draw.sample(range(n_seq), self._draw.randint(2, n_seq))
        sizes = ",".join(str(min(self._size(), 30)) for _ in seq_ids)
        known = "lan" if self._can.logits_all else "ln"
        modes = ",".join(self._draw.choice(known) for _ in seq_ids)
        self._add("spans", "q" + "".join(map(str, seq_ids)), sizes, modes, self._at())

    def _through_bytes(self) -> None:
        if not self._can.sequence_state:
            return
        seq_id, slot = self._any(), len(self._steps)
        self._add("save", slot, seq_id)
        for _ in range(self._draw.randint(0, 2)):
            self._append()
        target = self._draw.randrange(self._books.n_seq_max)
        if self._add("load", slot, target):
            self._add("one", target, self._at())

    def _all_through_bytes(self) -> None:
        slot = len(self._steps)
        self._add("save_all", slot)
        for _ in range(self._draw.randint(0, 2)):
            self._append()
        if self._add("load_all", slot):
            for seq_id, past in enumerate(self._books.sequences):
                if len(past.tokens):
                    self._add("one", seq_id, self._at())

    def _switch(self) -> None:
        self._add("adapters", self._draw.choice((0, 100, 50, -50)))
        self._singles()

    def _end(self) -> None:
        if self._books.n_seq_max > 1:
            self._add("keep", self._any())
        else:
            self._add("clear")
