"""Which of a pool's sequences have cells, and how room is made for others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infercore.session.keeping import WORTH_KEEPING

if TYPE_CHECKING:
    from collections.abc import Collection
    from collections.abc import Sequence as Parts

    from infercore.session.jobs import Job
    from infercore.session.keeping import Keeping
    from infercore.session.roster import Roster
    from infercore.session.sequence import Sequence
    from infercore.session.shared_engine import SharedEngine
    from infercore.session.tally import Tally

_MOST_AHEAD = 512
"""More tokens than these are not moved out ahead: a call that comes meanwhile would wait."""


class Places:
    """Gives sequences of the engine to sequences of sessions, and takes them back.

    Who has none of the places where tokens are evaluated may lose its cells, the least recently
    used first. ``sequences`` are all that are known; ``left`` are those of closed sessions, which
    hold cells until somebody wants these or what is in them: they count as free, so they go before
    those of any session that is open.
    """

    def __init__(
        self,
        engine: SharedEngine,
        roster: Roster,
        sequences: set[Sequence],
        keeping: Keeping,
        tally: Tally,
    ) -> None:
        self._engine = engine
        self._roster = roster
        self._sequences = sequences
        self._keeping = keeping
        self._tally = tally
        self._move: tuple[Sequence, int] | None = None
        self._n_changes = self._n_waited = 0
        self.left: set[Sequence] = set()
        self._ahead: dict[Sequence, None] = {}  # those left that were not moved out yet, in order
        self.free_all()

    def free_all(self) -> None:
        """Take all that the engine has for free: it was opened anew."""
        self._sequences -= self.left
        self.left.clear()
        self._ahead.clear()
        self.free_ids = list(range(self._engine.context.n_seq_max - 1, -1, -1))

    def adopt(self, sequence: Sequence, seq_id: int) -> None:
        """Let ``sequence`` have ``seq_id``, in which all its tokens lie already."""
        self.free_ids.remove(seq_id)
        sequence.seq_id = seq_id
        sequence.n_held = sequence.n_cells = sequence.n_high = len(sequence.tokens)

    def has_id(self, sequence: Sequence) -> bool:
        """Return whether it has a sequence of the engine, or there is a free one for it."""
        return sequence.seq_id is not None or bool(self.free_ids)

    def next_to_go(self, sequence: Sequence) -> Sequence | None:
        """Return who loses its sequence of the engine to ``sequence``; None where nobody does."""
        return None if self.has_id(sequence) else next(iter(self.idle()), None)

    def take_id(self, sequence: Sequence, source: Sequence | None = None) -> bool:
        """Let ``sequence`` have a sequence of the engine, but not that of ``source``.

        False where all are in use.
        """
        if sequence.seq_id is not None:
            return True
        if not self.has_id(sequence):
            idle = self.idle(sequence, source)
            if not idle:
                return False
            self.let_go(idle[0], keep=True)
        sequence.seq_id = self.take_beside()
        sequence.n_held = sequence.n_cells = 0
        return True

    def leave(self, sequence: Sequence) -> None:
        """Let a closed session's cells stay, or free them and keep what they hold elsewhere."""
        if self._keeping.stays_in_place and sequence.n_held and not sequence.is_cut:
            self._engine.trim(sequence)
            sequence.set_row(None)
            self.left.add(sequence)
            if sequence.n_held <= _MOST_AHEAD:
                self._ahead[sequence] = None
        else:
            self._sequences.discard(sequence)
            self.let_go(sequence, keep=True)

    @property
    def has_ahead(self) -> bool:
        """Whether all places are taken, some by closed sessions of which nothing is stored yet."""
        return not self.free_ids and bool(self._ahead)

    def move_out_ahead(self) -> None:
        """Store what one of those left holds: who then wants its place need not wait for that."""
        sequence = next(iter(self._ahead))
        del self._ahead[sequence]
        self._keeping.move_out(sequence)

    def take_over(self, sequence: Sequence, source: Sequence, n: int) -> bool:
        """Give ``sequence`` the engine's sequence of ``source``, with its first ``n`` tokens.

        ``source`` is left and holds nothing else that is worth keeping, or it is the next that has
        to go, and what it holds is moved out first. False where it is neither, where ``sequence``
        has cells or saved state of its own, and where the engine could not go back, so that
        ``source`` holds nothing any more.
        """
        if sequence.seq_id is not None or sequence.saved is not None:
            return False
        if source not in self.left or source.n_held - n >= WORTH_KEEPING:
            if self.next_to_go(sequence) is not source:
                return False
            self._keeping.move_out(source)
        source.n_held = min(source.n_held, n)
        self._engine.trim(source)
        if source.n_held < n:
            return False
        sequence.seq_id, sequence.n_held, sequence.n_cells = source.seq_id, n, source.n_cells
        sequence.n_high = max(sequence.n_high, n)
        sequence.ends = [end for end in source.ends if end <= n] + [
            end for end in sequence.ends if end > n
        ]
        self._drop(source)
        return True

    def _drop(self, sequence: Sequence) -> None:
        sequence.lose()
        self._ahead.pop(sequence, None)
        if sequence in self.left:
            self.left.remove(sequence)
            self._sequences.discard(sequence)

    def flush(self, namespace: str | None) -> None:
        """Free the cells of those left, of all namespaces or of one, and keep nothing of them."""
        for sequence in [*self.left]:
            if namespace is None or sequence.namespace == namespace:
                self.let_go(sequence, keep=False)

    def take_beside(self) -> int:
        """Take the free one with most neighbours among those that run, the last freed of several.

        An engine may evaluate neighbours at once, and others apart; see `steady.place`.
        """
        running = {job.sequence.seq_id for job in self._roster.running}
        free = self.free_ids
        best = max(reversed(free), key=lambda i: (i - 1 in running) + (i + 1 in running))
        free.remove(best)
        return best

    def close_gap(self) -> None:
        """Let who runs have neighbouring places again, where one between them has become free.

        An engine with a cache for each may evaluate neighbours at once, and others apart. Nobody
        knows how long they will run: so a cache is copied once the gap has cost as many steps as
        the copy takes.
        """
        engine, roster = self._engine, self._roster
        if self._n_changes != roster.n_changes:
            self._n_changes, self._n_waited = roster.n_changes, 0
            batches = engine.copies_caches and engine.n_sequences > 1
            self._move = self._best_move() if batches and len(roster.running) > 1 else None
        if self._move is None:
            return
        self._n_waited += 1
        if self._n_waited <= engine.n_least_copied:
            return
        (sequence, seq_id), self._move = self._move, None
        for left in self.left:
            if left.seq_id == seq_id:
                self.let_go(left, keep=True)
                break
        if seq_id not in self.free_ids:
            return
        engine.context.seq_copy(sequence.own_id, seq_id)
        engine.context.seq_remove(sequence.own_id)
        self.free_ids.remove(seq_id)
        self.free_ids.append(sequence.own_id)
        sequence.seq_id = seq_id
        roster.n_changes += 1

    def _best_move(self) -> tuple[Sequence, int] | None:
        """Return who may go to which free place, so that those that run come to lie in one piece.

        Or in fewer, where the idle leave no row of places that is long enough.
        """
        of_id = {job.sequence.own_id: job.sequence for job in self._roster.running}
        if _n_pieces(of_id) == 1:
            return None
        free = (*self.free_ids, *(left.own_id for left in self.left))
        row = _best_row(of_id, free)
        if row is not None:
            goes = next(seq_id for seq_id in of_id if seq_id not in row)
            return of_id[goes], next(i for i in row if i not in of_id)
        best, least = None, _n_pieces(of_id)
        for seq_id in (max(of_id), min(of_id)):
            for to in free:
                n = _n_pieces({*of_id, to} - {seq_id})
                if n < least:
                    best, least = (of_id[seq_id], to), n
        return best

    def start_over(self, sequence: Sequence) -> None:
        """Let ``sequence``, which cannot be cut, hold nothing."""
        self.let_go(sequence, keep=False)
        self.take_id(sequence)

    def let_go(self, sequence: Sequence, *, keep: bool) -> None:
        """Free the cells of ``sequence``; ``keep`` what they hold where there is a place for it."""
        if sequence.seq_id is None:
            return
        if keep and sequence.n_held:
            self._keeping.move_out(sequence)
        self._engine.context.seq_remove(sequence.seq_id)
        self.free_ids.append(sequence.seq_id)
        self._drop(sequence)

    def let_go_all(self) -> None:
        """Free the cells of all that are idle, and keep what they hold."""
        for sequence in self.idle():
            self.let_go(sequence, keep=True)

    def preempt(self, job: Job) -> None:
        """Take place and cells away from ``job``; it goes on from its tokens when there is room."""
        self._roster.lose_place(job)
        self.let_go(job.sequence, keep=True)
        self._tally.n_preempted += 1

    def idle(self, *spared: Sequence | None) -> list[Sequence]:
        """Return who has cells and no place: closed sessions', then the least recently used."""
        running = {job.sequence for job in self._roster.running}
        idle = [
            s
            for s in self._sequences
            if s.seq_id is not None and s not in running and s not in spared
        ]
        return sorted(idle, key=lambda s: (s not in self.left, s.used))

    def make_free(self, sequence: Sequence, n: int, spare: Sequence | None = None) -> bool:
        """Free cells until ``n`` more fit behind ``sequence``, taking them from those idle."""
        engine = self._engine
        if engine.n_free(sequence) >= n:
            return True
        if not engine.is_shared:
            return False
        for idle in self.idle(sequence, spare):
            if idle.n_cells > idle.n_held:
                engine.trim(idle)
                if engine.n_free(sequence) >= n:
                    return True
        for idle in self.idle(sequence, spare):
            self.let_go(idle, keep=True)
            if engine.n_free(sequence) >= n:
                return True
        return False

    def have_room(self, parts: Parts[tuple[Job, int]]) -> bool:
        """Make room for an engine call; who has no place may lose its cells for that.

        False where that is not enough.
        """
        for job, _ in parts:
            self._engine.trim(job.sequence)
        if self._engine.is_shared:
            return self.make_free(parts[0][0].sequence, sum(n for _, n in parts))
        return all(self.make_free(job.sequence, n) for job, n in parts)


def _best_row(ids: Collection[int], free: Collection[int]) -> range | None:
    """Return the row of as many places, each in ``ids`` or ``free``, to which the fewest go."""
    n, known = len(ids), {*ids, *free}
    rows = (range(start, start + n) for start in known)
    whole = [row for row in rows if known.issuperset(row)]
    return max(whole, key=lambda row: sum(i in ids for i in row), default=None)


def _n_pieces(ids: Collection[int]) -> int:
    """Return in how many runs of neighbours ``ids`` lie."""
    return sum(i - 1 not in ids for i in ids)
