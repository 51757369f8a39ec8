"""The steps in which each that runs wants a token: what most steps of a pool are."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from infercore.session.compose import longest_waiting

if TYPE_CHECKING:
    from collections.abc import Callable

    from infercore.session.choosing import Choosing
    from infercore.session.jobs import Generating, Job
    from infercore.session.recovery import Recovery
    from infercore.session.roster import Roster
    from infercore.session.sequence import Sequence as TokenSequence
    from infercore.session.shared_engine import SharedEngine


class Steady:
    """Takes such a step for all its members at once, and goes on with the same ones.

    Who they are is kept until somebody comes, goes, or wants anything else than the token that it
    chose. ``per_call`` returns how many of so many a call takes; ``on_step`` is called with how
    many took part and the milliseconds of the engine call.
    """

    # It runs behind an engine that has emptied the processor's caches, so what it touches costs
    # more than what it computes: one look at each member, and none at what did not change.

    def __init__(
        self,
        *,
        engine: SharedEngine,
        roster: Roster,
        choosing: Choosing,
        recovery: Recovery,
        per_call: Callable[[int], int],
        on_step: Callable[[int, float], object],
    ) -> None:
        self._engine = engine
        self._roster = roster
        self._choosing = choosing
        self._recovery = recovery
        self._per_call = per_call
        self._on_step = on_step
        self._jobs: list[Generating] = []
        self._sequences: list[TokenSequence] = []
        self._seq_ids: list[int] = []
        self._tokens: list[int] = []
        self._n_changes = -1
        self._n_left = 0
        self._is_greedy = False

    def forget(self) -> None:
        """Look at each anew before the next step: something else was done with one of them."""
        self._n_changes = -1

    def find(self, n_most: int) -> bool:
        """Know whose step is next, of at most ``n_most``; False where it is another kind of step.

        Such as where somebody wants more than a token, or has no room.
        """
        n_running = len(self._roster.running)
        if self._n_changes != self._roster.n_changes:
            return self._look(n_most, n_running)
        jobs, engine = self._jobs, self._engine
        if len(jobs) != n_running or self._per_call(n_running) != n_running:
            return self._look(n_most, n_running)
        if engine.is_shared:
            return engine.n_free(self._sequences[0]) >= n_running
        self._n_left -= 1
        return self._n_left > 0 or self._look(n_most, n_running)

    def _look(self, n_most: int, n_running: int) -> bool:
        # One look at each: what `compose` and `Places.have_room` look at one by one.
        engine, running = self._engine, self._roster.running
        self._n_changes = -1
        n = min(n_running, engine.n_sequences, n_most)
        if n < 2 or self._roster.alone or engine.multiple is not None:  # noqa: PLR2004
            return False
        for job in running:
            sequence = job.sequence
            n_held = sequence.n_held
            if (
                len(sequence.tokens) != n_held + 1
                or sequence.n_cells != n_held
                or job.ahead is not None
                or not job.primed
            ):
                return False
        n = min(n, self._per_call(n_running))
        if n < 2:  # noqa: PLR2004
            return False
        jobs: list[Any] = sorted(longest_waiting(running, n), key=place)
        sequences = [job.sequence for job in jobs]
        room = [engine.n_free(sequence) for sequence in sequences]
        if engine.is_shared and room[0] < n:
            return False
        self._n_left = min(room)
        if not self._n_left:
            return False
        self._jobs, self._sequences = jobs, sequences
        self._seq_ids = [sequence.own_id for sequence in sequences]
        self._tokens = [sequence.tokens[-1] for sequence in sequences]
        self._is_greedy = all(job.generation.not_best is not None for job in jobs)
        self._n_changes = self._roster.n_changes
        return True

    def take(self, n_steps: int, on_call: Callable[[list[TokenSequence]], object] | None) -> None:
        """Make the engine call that `find` found, the ``n_steps``th, and let each choose."""
        jobs, n = self._jobs, len(self._jobs)
        n_changes, self._n_changes = self._n_changes, -1
        started = time.perf_counter()
        try:
            if on_call is not None:
                on_call(self._sequences)
            rows = self._engine.context.decode_each(self._tokens, self._seq_ids)
        except BaseException as error:  # noqa: BLE001  (each job is told)
            self._recovery.after(error, jobs)
            return
        finally:
            if on_call is not None:
                on_call([])
        ended = time.perf_counter()
        for job in jobs:
            sequence = job.sequence
            sequence.n_held = sequence.n_cells = n_held = sequence.n_held + 1
            if n_held > sequence.n_high:
                sequence.n_high = n_held
            else:
                sequence.n_again += 1
            sequence.used = job.served = n_steps
            job.failures = 0
            job.n_steps += 1
            job.n_batched += n
        self._on_step(n, (ended - started) * 1e3)
        tokens = self._choosing.choose_each(jobs, rows, ended, is_greedy=self._is_greedy)
        if tokens is not None:
            self._tokens, self._n_changes = tokens, n_changes


def place(job: Job) -> int:
    """Return where ``job`` stands in a call: in the order of the engine's sequences.

    An engine with cells for each sequence evaluates neighbours at once: llama.cpp cuts a call
    wherever an id does not follow the one before it, and each part reads all weights anew.
    """
    return job.sequence.own_id
