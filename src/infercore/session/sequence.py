"""What one session of a pool wants held, and how much of it the engine holds: a value and a cache.

Pure: nothing here calls an engine. A sequence may lose its cells at any time and is the same
sequence; whoever owns the context lets held catch up with what is wanted.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from infercore.session.tape import common_prefix

if TYPE_CHECKING:
    from collections.abc import Sequence as Tokens

    from infercore.protocols.spi import FloatArray
    from infercore.session.jobs import Job
    from infercore.session.store import Saved


class Sequence:
    """Tokens that are wanted, the first ``n_held`` of which lie in cells of the engine.

    ``n_cells`` tokens lie in them in all: what is beyond ``n_held`` is to be removed before more
    is evaluated. ``row`` are the logits behind the last token, None where they are not known.
    ``n_high`` is how many of the tokens were evaluated at some time: to evaluate one of these is
    to evaluate it again. At ``cut``, unless that is None, tokens were taken out: what was
    computed behind them cannot be computed anew. What others hold is of use to it only in its
    ``namespace`` and with its ``identity``, and never while it ``is_cold``. ``ends`` are where the
    calls ended that evaluated it, so that it can be evaluated again in the same ones.
    """

    __slots__ = (
        "cut", "ends", "ghost", "ghost_ends", "identity", "is_cold", "job", "n_again", "n_cells",
        "n_held", "n_high", "n_saved", "namespace", "row", "saved", "seq_id", "serial", "tokens",
        "used",
    )  # fmt: skip

    def __init__(self, namespace: str = "") -> None:
        self.namespace = namespace
        self.identity = ""
        self.is_cold = False
        self.tokens: list[int] = []
        self.n_held = 0
        self.n_cells = 0
        self.n_high = 0
        self.seq_id: int | None = None
        self.row: FloatArray | None = None
        self.serial = 0
        self.cut: int | None = None
        self.saved: Saved | None = None
        self.n_saved = 0
        self.ghost: list[int] = []
        self.ghost_ends: list[int] = []
        self.ends: list[int] = []
        self.used = 0
        self.n_again = 0
        self.job: Job | None = None

    @property
    def is_cut(self) -> bool:
        """Whether tokens were taken out before some that are held."""
        return self.cut is not None

    @property
    def family(self) -> tuple[str, str]:
        """Namespace and identity: what is held is of use only to sequences with the same ones."""
        return self.namespace, self.identity

    @property
    def own_id(self) -> int:
        """Its sequence of the context, which it must have."""
        if self.seq_id is None:
            raise RuntimeError("a sequence without cells was asked for their id")
        return self.seq_id

    @property
    def n_known(self) -> int:
        """Tokens that can be had without evaluating them: held, or kept for this sequence alone."""
        return max(self.n_held, self.n_saved)

    def extend(self, tokens: Tokens[int]) -> None:
        """Want ``tokens`` too, behind the others."""
        if self.ghost:  # the same as were lost: evaluating them is evaluating them again
            n = common_prefix(self.ghost, list(tokens))
            self.n_high = max(self.n_high, len(self.tokens) + n)
            self.ends += [end for end in self.ghost_ends if end <= self.n_high]
            self.ghost, self.ghost_ends = [], []
        self.tokens.extend(tokens)
        self.set_row(None)

    def push(self, token: int) -> None:
        """Want a token more, which was chosen from the row behind the others.

        `Choosing.choose_each` does the same in place where there is no ghost.
        """
        if self.ghost:
            self.extend([token])
            return
        self.tokens.append(token)
        self.row = None
        self.serial += 1

    def truncate(self, n: int) -> None:
        """Want only the first ``n`` tokens."""
        if n >= len(self.tokens):
            return
        del self.tokens[n:]
        self.n_held = min(self.n_held, n)
        self.n_high = min(self.n_high, n)
        if self.cut is not None and n <= self.cut:
            self.cut = None  # nothing is left that was computed with more before it
        while self.ends and self.ends[-1] > n:
            self.ends.pop()
        self.save(None)
        self.set_row(None)

    def keep(self, n: int) -> None:
        """Want only the first ``n`` tokens, and remember those of the others that were lost."""
        if n < len(self.tokens):
            lost = n >= self.n_known
            ghost = self.tokens[n : self.n_high] if lost else []
            ends = [end for end in self.ends if end > n] if lost else []
            self.truncate(n)
            self.ghost, self.ghost_ends = ghost, ends

    def hold(self, n: int) -> int:
        """Note that the first ``n`` tokens are held; return how many of them are so again."""
        again = 0
        if self.n_held < self.n_high:
            again = max(0, min(n, self.n_high) - self.n_held)
            self.n_again += again
        self.n_held = self.n_cells = n
        self.n_high = max(self.n_high, n)
        if not self.ends or n > self.ends[-1]:
            self.ends.append(n)
        return again

    def next_end(self) -> int | None:
        """Return where the call ended in which the token behind those held was evaluated first."""
        i = bisect_right(self.ends, self.n_held)
        return self.ends[i] if i < len(self.ends) else None

    def hold_whole_calls(self) -> None:
        """Hold no part of what one call evaluated: the rest of it belongs to the same bits."""
        i = bisect_right(self.ends, self.n_held)
        self.n_held = self.ends[i - 1] if i else 0

    def cut_out(self, start: int, end: int, n_moved: int) -> None:
        """Want the tokens in [start, end) no more; ``n_moved`` cells of those behind moved up."""
        self.n_held = self.n_high = self.n_cells = min(start, self.n_held) + n_moved
        del self.tokens[start:end]
        if n_moved:
            self.cut = start if self.cut is None else min(start, self.cut)
        elif self.cut is not None and start <= self.cut:
            self.cut = None
        self.ends = [place for place in self.ends if place <= start]
        self.save(None)
        self.set_row(None)

    def save(self, data: Saved | None) -> None:
        """Keep ``data``, which has what is held now; None forgets it."""
        self.saved = data
        self.n_saved = 0 if data is None else self.n_held

    def lose(self) -> None:
        """Note that the engine holds nothing of it any more."""
        self.n_held = self.n_cells = 0
        self.seq_id = None

    def set_row(self, row: FloatArray | None) -> None:
        """Take the logits behind the last token, or forget them."""
        self.row = row
        self.serial += 1
