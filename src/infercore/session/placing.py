"""What a sequence holds when its job gets a place: its own, another's, what was kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infercore.errors import (
    ContextOverflowError,
    InferCoreError,
    SnapshotError,
    UnsupportedFeatureError,
)
from infercore.session.jobs import Generating
from infercore.session.keeping import WORTH_KEEPING
from infercore.session.tape import common_prefix

if TYPE_CHECKING:
    from infercore.session.jobs import Job
    from infercore.session.keeping import Keeping
    from infercore.session.places import Places
    from infercore.session.prefixes import Prefixes
    from infercore.session.roster import Roster
    from infercore.session.sequence import Sequence
    from infercore.session.shared_engine import SharedEngine
    from infercore.session.store import Found, Saved
    from infercore.session.tally import Tally


class Placing:
    """Makes sequences ready to be evaluated.

    As much as possible of what is wanted is held then without being evaluated: copied from another
    sequence, or brought back from where it was moved to.
    """

    def __init__(
        self,
        *,
        engine: SharedEngine,
        places: Places,
        roster: Roster,
        sequences: set[Sequence],
        prefixes: Prefixes,
        keeping: Keeping,
        tally: Tally,
    ) -> None:
        self._engine = engine
        self._places = places
        self._roster = roster
        self._sequences = sequences
        self._prefixes = prefixes
        self._keeping = keeping
        self._tally = tally

    def place(self, job: Job) -> bool | None:
        """Make ``job`` ready to be evaluated; None where it had better wait for another's tokens.

        False where there is no room before others end.
        """
        sequence, places, engine = job.sequence, self._places, self._engine
        n_most = _most_held(job)
        source, n_shared = self._prefixes.source(sequence, n_most)
        n_found = max(sequence.n_held, n_shared)
        running = self._roster.running
        if job.n_looked is None and self._prefixes.is_coming(sequence, n_found, running):
            return None
        if source is not None and self._have_cells_of(job, source, n_shared, n_most):
            source = None
        if n_shared < sequence.n_held + WORTH_KEEPING and not places.has_id(sequence):
            source, n_shared = None, 0  # the order of use matters more than a short copy
        if not places.take_id(sequence, source):
            source, n_shared = None, 0
            if not places.take_id(sequence):
                return False
        n_found = max(sequence.n_held, n_shared)
        engine.trim(sequence)
        n_needed = max(1, len(sequence.tokens) - n_found)
        stored = self._stored(job, n_most)
        if stored is not None and stored.n_tokens > n_found:
            source, n_needed = None, max(n_needed, stored.n_stored)
        elif n_found < sequence.n_held + WORTH_KEEPING and engine.n_free(sequence) < n_needed:
            source, n_needed = None, max(1, len(sequence.tokens) - sequence.n_held)
        if not places.make_free(sequence, n_needed, spare=source) and running:
            return False
        self._fill(job, source, n_shared, stored)
        return True

    def _have_cells_of(self, job: Job, source: Sequence, n: int, n_most: int) -> bool:
        """Let ``job`` have the cells of ``source``, or of who has to go and holds the ``n`` too.

        False where neither gives them away, and where more than ``n`` tokens are stored.
        """
        sequence, places = job.sequence, self._places
        if sequence.seq_id is not None:
            return False
        if not job.placed_once:  # what was taken over in a try that failed is lost
            job.n_shared = 0
        stored = self._stored(job, n_most)
        if stored is not None and stored.n_tokens > n:
            return False
        was_left = source in places.left
        if not places.take_over(sequence, source, n):
            other = places.next_to_go(sequence)
            if other is None or other is source or not self._prefixes.has(other, sequence, n):
                return False
            was_left = other in places.left
            if not places.take_over(sequence, other, n):
                return False
        if was_left:
            self._count_restored(job, n)
        elif not job.placed_once:
            job.n_shared = n
        return True

    def _fill(self, job: Job, source: Sequence | None, n_shared: int, stored: Found | None) -> None:
        """Let ``job`` hold what there is of its tokens: its own, another's, what was kept."""
        sequence = job.sequence
        if sequence.saved is not None and not sequence.n_held:
            self._restore_own(job)
        elif source is not None and n_shared > sequence.n_held:
            self._copy(job, source, n_shared)
        elif stored is not None:
            self._restore_stored(job, stored)

    # -- the rows that are chosen from ---------------------------------------------------------

    def leave_rows(self, job: Job) -> None:
        """Hold less where what is held came without the rows that ``job`` chooses from."""
        n_most = _most_held(job)
        if job.sequence.n_held > n_most:
            self._hold_less(job.sequence, n_most)

    def _hold_less(self, sequence: Sequence, n: int) -> None:
        """Hold ``n`` tokens, so that the others are evaluated; none where that cannot be."""
        engine = self._engine
        if not sequence.tokens:
            raise ContextOverflowError(
                stage="decode", resident_tokens=0, additional_tokens=1, n_ctx=engine.context.n_ctx
            )
        if engine.can_truncate:
            sequence.n_held = n
            if engine.multiple is not None:
                sequence.hold_whole_calls()
        else:
            self._places.start_over(sequence)

    # -- copies --------------------------------------------------------------------------------

    def _copy(self, job: Job, source: Sequence, n: int) -> None:
        engine, context = self._engine, self._engine.context
        sequence, n_kept = job.sequence, job.sequence.n_held
        if source.n_cells > source.n_held and engine.can_truncate:
            engine.trim(source)
        if source.n_held < n:  # the engine could not go back, and holds nothing of it now
            return
        engine.empty(sequence)
        if context.capabilities.kv_copy == "any":
            try:
                context.seq_copy(source.own_id, sequence.own_id, 0, n)
            except UnsupportedFeatureError:  # what a window has passed is gone
                return
            sequence.n_cells = n
        else:
            context.seq_copy(source.own_id, sequence.own_id)
            sequence.n_cells = source.n_cells
        sequence.n_held = n
        sequence.n_high = max(sequence.n_high, n)
        sequence.ends = [end for end in source.ends if end <= n] + [
            end for end in sequence.ends if end > n
        ]
        if not job.placed_once:
            job.n_shared = n - n_kept
        if n >= WORTH_KEEPING:  # a common first token is no use of what follows it
            source.used = self._tally.n_steps
        engine.trim(sequence)

    def copy_cells(self, source: Sequence, target: Sequence) -> None:
        """Let ``target`` hold what ``source`` holds, where that costs no other its cells.

        Else what it holds is copied, or evaluated, when it is needed.
        """
        engine, context = self._engine, self._engine.context
        kinds = context.capabilities
        if source.seq_id is not None and kinds.kv_copy != "none" and self._places.free_ids:
            engine.trim(source)
            target.seq_id = self._places.take_beside()
            context.seq_copy(source.seq_id, target.seq_id)
            target.n_held = target.n_cells = source.n_held
        elif source.is_cut and source.seq_id is not None and kinds.sequence_state:
            engine.trim(source)
            target.n_held = source.n_held
            target.save(context.hand_over(source.seq_id))
            target.n_held = 0
        else:
            target.saved, target.n_saved = source.saved, source.n_saved
        target.used = self._tally.n_steps

    # -- what was kept -------------------------------------------------------------------------

    def _stored(self, job: Job, n_most: int) -> Found | None:
        if job.n_looked is not None:
            return None
        whole = not self._engine.can_truncate and not (isinstance(job, Generating) and job.primed)
        n = len(job.sequence.tokens) if whole else n_most  # its row is saved with it
        return self._keeping.find(job.sequence, n)

    def _restore_own(self, job: Job) -> None:
        sequence = job.sequence
        data = sequence.saved
        sequence.save(None)
        if data is not None and self._load(sequence, data) and not job.placed_once:
            job.n_restored = sequence.n_held

    def _restore_stored(self, job: Job, stored: Found) -> None:
        sequence, engine = job.sequence, self._engine
        if stored.n_tokens <= sequence.n_held or engine.n_free(sequence) < stored.n_stored:
            return
        data, n_kept = stored.load(), sequence.n_held
        if data is None:
            return
        engine.empty(sequence)
        if self._load(sequence, data):
            self._count_restored(job, max(0, sequence.n_held - n_kept))

    def _count_restored(self, job: Job, n: int) -> None:
        if not job.placed_once:
            job.n_restored = n
        self._tally.restored_tokens += n

    def _load(self, sequence: Sequence, data: Saved) -> bool:
        """Put saved state into the engine; False where it was refused."""
        engine = self._engine
        try:
            if isinstance(data, bytes):
                engine.context.load_sequence(sequence.own_id, data)
            else:
                engine.context.take_over(sequence.own_id, data)
        except SnapshotError:
            self.look_at_engine()
            return False
        held = engine.context.tokens(sequence.own_id)
        n = common_prefix(held, sequence.tokens)
        sequence.n_cells, sequence.n_held = len(held), n
        if n < len(held) and not engine.can_truncate:
            self._places.start_over(sequence)
            return False
        sequence.n_high = max(sequence.n_high, n)
        if not engine.can_truncate and n == len(sequence.tokens):
            engine.take_row(sequence)
        engine.trim(sequence)
        return True

    def load_whole(self, sequence: Sequence, data: bytes, cut: int | None) -> None:
        """Let ``sequence``, which has its cells, be just what ``data`` holds, with a ``cut`` there.

        Raises what `Context.load_sequence` raises.
        """
        context = self._engine.context
        try:
            context.load_sequence(sequence.own_id, data)
        except InferCoreError as error:
            self.look_at_engine()
            if error.state_after == "cleared":
                sequence.truncate(0)
            raise
        sequence.tokens = context.tokens(sequence.own_id)
        sequence.n_held = sequence.n_cells = sequence.n_high = len(sequence.tokens)
        sequence.save(None)
        sequence.cut = cut
        sequence.used = self._tally.n_steps
        self._engine.take_row(sequence)

    # -- after a failure -----------------------------------------------------------------------

    def look_at_engine(self) -> None:
        """Take what the engine holds for what is held."""
        self._engine.look_at(self._sequences)
        for job in self._roster.running:
            if job.sequence.tokens:  # the engine did it before it failed: its rows are gone
                self.leave_rows(job)


def _most_held(job: Job) -> int:
    """Return how many tokens of ``job`` may be held when it begins.

    The rows that it chooses from are made by evaluating the token before each of them.
    """
    sequence = job.sequence
    if job.n_looked is not None:
        return job.n_looked
    if isinstance(job, Generating):
        if job.primed:  # the token that was chosen last is sure, guesses are not
            return job.n_sure - 1
        has_row = sequence.row is not None and not job.generation.is_native
    else:
        has_row = sequence.row is not None or not job.need_row
    return len(sequence.tokens) - (not has_row)
