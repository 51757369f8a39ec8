"""What a context should hold after each step of a program, and the logits it should make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.conformance.oracle import Past

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from infercore.conformance.oracle import Numbers, Oracle
    from infercore.conformance.rig import Rig

    Rows = list[Numbers | None]

MODES = {"l": "last", "a": "all", "n": "none"}


class Live:
    """Numbers of the oracle; adapters are added to its weights."""

    def __init__(self, rig: Rig, oracle: Oracle) -> None:
        self._rig = rig
        self._plain = self._now = oracle

    def adapt(self, percent: int) -> None:
        """Compute with the rig's adapter at that scale from now on."""
        self._now = self._rig.adapted(self._plain, percent / 100) if percent else self._plain

    def nothing(self) -> Past:
        """Return an empty sequence."""
        return self._plain.nothing()

    def append(self, past: Past, tokens: Sequence[int], wanted: Sequence[int]) -> tuple[Past, Rows]:
        """Return ``past`` with ``tokens`` appended, and the rows of those that are ``wanted``."""
        longer, hidden = self._now.append(past, tokens)
        return longer, list(self._now.logits(hidden[list(wanted)]))


class Cold:
    """Where there is no oracle: a cold run of the same tokens, as long as nothing was moved.

    In place of keys each cell has a number that stands for all that it was computed from.
    """

    def __init__(self, rig: Rig, *, computes: bool) -> None:
        self._rig = rig
        self._computes = computes
        self._percent = 0

    def adapt(self, percent: int) -> None:
        """Compute with the rig's adapter at that scale from now on."""
        self._percent = percent

    def nothing(self) -> Past:
        """Return an empty sequence."""
        none = np.empty(0, np.int64)
        return Past(none, none, np.empty((1, 0)), np.empty((1, 0)))

    def append(self, past: Past, tokens: Sequence[int], wanted: Sequence[int]) -> tuple[Past, Rows]:
        """Return ``past`` with ``tokens`` appended, and the last row if it can be known."""
        traces = past.keys[0].tolist()
        positions = past.end + np.arange(len(tokens))
        for token, at in zip(tokens, positions.tolist(), strict=True):
            traces.append(_trace(traces, token, at, self._percent))
        new = np.array(traces[len(past.tokens) :])[None]
        longer = past.joined(Past(np.array(tokens, np.int64), positions, new, new))
        rows: Rows = [None] * len(wanted)
        if self._computes and wanted and wanted[-1] == len(tokens) - 1 and self._is_cold(longer):
            fields = {"n_ctx": max(self._rig.n_ctx, len(longer.tokens))}
            adapters = self._rig.adapters_at(self._percent / 100)
            row = self._rig.cold(longer.tokens.tolist(), **fields, adapters=adapters)
            rows[-1] = row.astype(np.float64)
        return longer, rows

    def _is_cold(self, past: Past) -> bool:
        """Whether the sequence is what one call in an empty context would make."""
        traces: list[float] = []
        for at, token in enumerate(past.tokens.tolist()):
            traces.append(_trace(traces, token, at, self._percent))
        return bool(
            np.array_equal(past.positions, np.arange(len(traces)))
            and np.array_equal(past.keys[0], traces)
        )


def _trace(before: Sequence[float], token: int, at: int, percent: int) -> float:
    return float(hash((before[-1] if before else 0.0, len(before), token, at, percent)) % 2**50)


class Shadow:
    """The books of every sequence, changed by the same steps as a context's.

    ``computes=False`` keeps the books alone, for writing programs.
    """

    def __init__(self, rig: Rig, context: Any, *, computes: bool = True) -> None:
        oracle = rig.live_oracle() if computes else None
        self._rig = rig
        self._numbers = Cold(rig, computes=computes) if oracle is None else Live(rig, oracle)
        self._can = context.capabilities
        self.n_seq_max: int = context.n_seq_max
        self._n_batch: int = context.n_batch
        shared = self.n_seq_max == 1 or bool(context.effective.get("kv_unified"))
        self._room = context.n_ctx if shared else None
        self._room_each: int = context.n_ctx_seq
        self._last = rig.model.info.n_ctx_train or 2**20
        self.sequences = [self._numbers.nothing() for _ in range(self.n_seq_max)]
        self._slots: dict[int, tuple[int, Any]] = {}
        self._percent = 0
        self._copied: set[int] = set()

    def may_refuse(self, name: str, args: Sequence[Any]) -> bool:
        """Whether an engine may rightly refuse a step that its capabilities speak for.

        Where copies are the same cells, one cannot be moved without the other; a narrow cache that
        several sequences share, or that was restored, has less to go back to.
        """
        if name in ("threads", "warm"):  # more than the machine has; a window that is full
            return True
        if name in ("shift", "divide"):
            return args[0] in self._copied
        return self.is_narrow and name in ("remove", "eval", "copy")

    @property
    def is_narrow(self) -> bool:
        """Whether the engine may hold less of the past than its capabilities promise."""
        shared = self.n_seq_max > 1 or bool(self._slots)
        return bool(self._can.kv_remove == "rollback" and shared)

    def allows(self, name: str, args: Sequence[Any]) -> bool:
        """Whether the contract allows this step where the program has come to."""
        check = getattr(self, f"_allows_{name}", None)
        return check is None or bool(check(*args))

    def take(self, name: str, args: Sequence[Any]) -> Rows | None:
        """Take a step; return the rows that it makes, None where it makes none."""
        rows: Rows | None = getattr(self, f"_take_{name}")(*args)
        return rows

    # -- tokens in -----------------------------------------------------------------------------

    def _fits(self, added: dict[int, int]) -> bool:
        """Whether so many more tokens fit, by sequence."""
        held = [len(past.tokens) + added.get(s, 0) for s, past in enumerate(self.sequences)]
        ends = [past.end + added.get(s, 0) for s, past in enumerate(self.sequences)]
        if max(ends) > self._last or any(s >= self.n_seq_max for s in added):
            return False
        return sum(held) <= self._room if self._room else max(held) <= self._room_each

    def _append(self, seq_id: int, tokens: Sequence[int], mode: str) -> Rows:
        n = len(tokens)
        wanted = {"last": [n - 1], "all": list(range(n)), "none": []}[mode]
        self.sequences[seq_id], rows = self._numbers.append(self.sequences[seq_id], tokens, wanted)
        return rows

    def _allows_decode(self, seq_id: int, n: int, at: int, mode: str) -> bool:
        del at, mode
        return n > 0 and self._fits({seq_id: n})

    def _take_decode(self, seq_id: int, n: int, at: int, mode: str) -> Rows:
        return self._append(seq_id, self._rig.story_at(at, n), mode)

    def _allows_one(self, seq_id: int, at: int) -> bool:
        del at
        return self._fits({seq_id: 1})

    def _take_one(self, seq_id: int, at: int) -> Rows:
        return self._append(seq_id, self._rig.story_at(at, 1), "last")

    def _allows_eval(self, seq_id: int, back: int, n: int, at: int) -> bool:
        del at
        past = self.sequences[seq_id]
        p0 = past.end - back
        tail = np.sort(past.positions[past.positions >= p0])
        kept = past.positions[past.positions < p0].max(initial=-1)
        whole = kept == p0 - 1 and np.array_equal(tail, np.arange(p0, past.end))
        may = back == 0 or self._allows_remove(seq_id, p0, -1)
        return bool(n > 0 and p0 >= 0 and whole and may and self._fits({seq_id: n}))

    def _take_eval(self, seq_id: int, back: int, n: int, at: int) -> Rows:
        if back:
            self._take_remove(seq_id, self.sequences[seq_id].end - back, -1)
        return self._append(seq_id, self._rig.story_at(at, n), "last")

    def _allows_batch(self, order: str, wanted: str, at: int) -> bool:
        del wanted, at
        counts = {int(s): order.count(s) for s in set(order[1:])}
        return sum(counts.values()) <= self._n_batch and self._fits(counts)

    def _take_batch(self, order: str, wanted: str, at: int) -> Rows:
        seq_ids, flags = [int(s) for s in order[1:]], [flag == "1" for flag in wanted[1:]]
        tokens = self._rig.story_at(at, len(seq_ids))
        rows: dict[int, Any] = {}
        for seq_id in set(seq_ids):
            own = [i for i, s in enumerate(seq_ids) if s == seq_id]
            asked = [k for k, i in enumerate(own) if flags[i]]
            self.sequences[seq_id], made = self._numbers.append(
                self.sequences[seq_id], [tokens[i] for i in own], asked
            )
            rows.update(zip((own[k] for k in asked), made, strict=True))
        return [rows[i] for i in sorted(rows)]

    def _allows_spans(self, order: str, sizes: str, modes: str, at: int) -> bool:
        added = {s: len(tokens) for s, tokens, _ in spans_of(self._rig, order, sizes, modes, at)}
        return len(added) == len(order) - 1 and self._fits(added)

    def _take_spans(self, order: str, sizes: str, modes: str, at: int) -> Rows:
        spans = spans_of(self._rig, order, sizes, modes, at)
        return [row for span in spans for row in self._append(*span)]

    # -- what is held --------------------------------------------------------------------------

    def _inside(self, seq_id: int, p0: int, p1: int) -> Any:
        positions = self.sequences[seq_id].positions
        return (positions >= p0) & ((positions < p1) | (p1 == -1))

    def _allows_remove(self, seq_id: int, p0: int, p1: int) -> bool:
        past, inside = self.sequences[seq_id], self._inside(seq_id, p0, p1)
        if inside.all() or not inside.any():
            return bool(inside.any())
        kind = self._can.kv_remove
        if kind == "any":
            return True
        at_end = p1 == -1 or p1 >= past.end
        reach = self._can.max_rollback if kind == "rollback" else past.end
        return bool(kind != "none" and at_end and past.end - p0 <= reach)

    def _take_remove(self, seq_id: int, p0: int, p1: int) -> None:
        self.sequences[seq_id] = self.sequences[seq_id].where(~self._inside(seq_id, p0, p1))

    def _allows_copy(self, src: int, dst: int, p0: int, p1: int) -> bool:
        if src == dst or max(src, dst) >= self.n_seq_max:
            return False
        source, inside = self.sequences[src], self._inside(src, p0, p1)
        if not inside.any():
            return False
        if inside.all():
            return self._fits({dst: len(source.tokens)})
        target, replaced = self.sequences[dst], self._inside(dst, p0, p1)
        above = target.positions[~replaced].max(initial=-1) >= p0
        may = not replaced.any() or self._allows_remove(dst, p0, p1)
        room = self._fits({dst: int(inside.sum())})
        return bool(self._can.kv_copy == "any" and may and room and not above)

    def _take_copy(self, src: int, dst: int, p0: int, p1: int) -> None:
        inside = self._inside(src, p0, p1)
        if inside.all():
            self.sequences[dst] = self.sequences[src]
        else:
            self._take_remove(dst, p0, p1)
            self.sequences[dst] = self.sequences[dst].joined(self.sequences[src].where(inside))
        self._copied |= {src, dst}

    def _take_keep(self, seq_id: int) -> None:
        for other in range(self.n_seq_max):
            if other != seq_id:
                self.sequences[other] = self._numbers.nothing()

    def _take_clear(self) -> None:
        self.sequences = [self._numbers.nothing() for _ in self.sequences]
        self._copied = set()

    # -- positions -----------------------------------------------------------------------------

    def _moved(self, seq_id: int, p0: int, p1: int, to: Any) -> bool:
        """Whether moving the positions in a range by ``to`` keeps the order of tokens."""
        past, inside = self.sequences[seq_id], self._inside(seq_id, p0, p1)
        if not inside.any():
            return False
        moved, low = to(past.positions[inside]), past.positions[past.positions < p0]
        high = past.positions[(past.positions >= p1) & (p1 != -1)]
        return bool(
            moved.min() > low.max(initial=-1)
            and moved.max() < high.min(initial=self._last)
            and moved.min() >= 0
        )

    def _allows_shift(self, seq_id: int, p0: int, p1: int, delta: int) -> bool:
        return delta != 0 and self._moved(seq_id, p0, p1, lambda at: at + delta)

    def _take_shift(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        past, inside = self.sequences[seq_id], self._inside(seq_id, p0, p1)
        self.sequences[seq_id] = past.at(np.where(inside, past.positions + delta, past.positions))

    def _allows_divide(self, seq_id: int, p0: int, p1: int, d: int) -> bool:
        return d > 1 and self._moved(seq_id, p0, p1, lambda at: at // d)

    def _take_divide(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        past, inside = self.sequences[seq_id], self._inside(seq_id, p0, p1)
        self.sequences[seq_id] = past.at(np.where(inside, past.positions // d, past.positions))

    # -- saved state, adapters -----------------------------------------------------------------

    def _take_save(self, slot: int, seq_id: int) -> None:
        self._slots[slot] = (self._percent, self.sequences[seq_id])

    def _allows_load(self, slot: int, seq_id: int) -> bool:
        percent, past = self._slots.get(slot, (None, None))
        return (
            isinstance(past, Past)
            and percent == self._percent
            and self._fits({seq_id: len(past.tokens)})
        )

    def _take_load(self, slot: int, seq_id: int) -> None:
        self.sequences[seq_id] = self._slots[slot][1]

    def _take_save_all(self, slot: int) -> None:
        self._slots[slot] = (self._percent, list(self.sequences))

    def _allows_load_all(self, slot: int) -> bool:
        percent, held = self._slots.get(slot, (None, None))
        return isinstance(held, list) and percent == self._percent

    def _take_load_all(self, slot: int) -> None:
        self.sequences = list(self._slots[slot][1])

    def _take_adapters(self, percent: int) -> None:
        self._percent = percent
        self._numbers.adapt(percent)

    def _take_threads(self, n: int) -> None:
        """Nothing that is held changes."""

    def _take_embed(self, on: int) -> None:
        """Nothing that is held changes."""

    def _take_warm(self) -> None:
        """Nothing that is held changes."""


def spans_of(
    rig: Rig, order: str, sizes: str, modes: str, at: int
) -> Iterator[tuple[int, list[int], str]]:
    """Return the spans (sequence, tokens, mode) of a step."""
    for seq_id, size, mode in zip(order[1:], sizes.split(","), modes.split(","), strict=True):
        yield int(seq_id), rig.story_at(at, int(size)), MODES[mode]
        at += int(size)
