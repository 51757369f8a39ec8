"""Many continuations of one session: beams and samples, which leave it as it was.

They are evaluated together where the session's context has room for several sequences (a pool, or
``n_seq_max`` above 1), and in turns where it has one.
"""

from __future__ import annotations

import secrets
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import attrs
import numpy as np

from infercore.errors import CallTimeoutError, DecodeAbortedError
from infercore.sampling.eog import eog_ids
from infercore.session.beams import BeamSearch, Path
from infercore.session.jobs import Job
from infercore.session.parts import PREFIXED
from infercore.session.stream import DecodeStream, begin
from infercore.session.text import TextAssembler
from infercore.values import checks
from infercore.values.config import MAX_SEED, sampling_of
from infercore.values.session import Beam, Completion, TokenLogprob, Usage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from infercore.protocols.spi import FloatArray
    from infercore.session.paged import PagedContext
    from infercore.session.session import CoreSession
    from infercore.values.config import DecodeConfig
    from infercore.values.session import FinishReason, StreamChunk

MOST = 256
_FLOAT = np.float32


# -- beams -----------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class BeamOptions:
    """What a beam search was asked for; see `Session.beam_search`."""

    n_beams: int = attrs.field(validator=checks.integer(1, MOST, optional=False))
    max_tokens: int = attrs.field(validator=checks.integer(1, optional=False))
    length_penalty: float = attrs.field(validator=checks.number(-100, 100, optional=False))
    n_return: int = attrs.field(validator=checks.integer(1, MOST, optional=False))
    early_stopping: bool = attrs.field(validator=checks.boolean(optional=False))

    def __attrs_post_init__(self) -> None:
        if self.n_return > self.n_beams:
            raise checks.refuse("n_return", self.n_return, f"at most n_beams, {self.n_beams}")


def beam_search(session: CoreSession, options: BeamOptions) -> list[Beam]:
    """Return the best beams behind a session that is held and can decode."""
    started = time.perf_counter()
    with _kept(session) as (prompt, n_cached):
        room = session.resident.capacity(prompt) - len(prompt)
        search = BeamSearch(
            options.n_beams,
            max_tokens=min(options.max_tokens, room),
            length_penalty=options.length_penalty,
            early_stopping=options.early_stopping,
            ends=eog_ids(session.model.tokenizer).tolist(),
        )
        share = session.shared.sharing(session) if options.n_beams > 1 else None
        rows = _InTurns(session, prompt) if share is None else _Together(session, share, prompt)
        first_at = None
        try:
            moves = search.step([rows.first()])
            first_at = time.perf_counter()
            while not search.done:
                if session.resident.cancelled:
                    raise _cancelled(len(prompt))
                moves = search.step(rows.after(moves))
        except DecodeAbortedError as error:
            raise _cancelled(len(prompt)) from error
        finally:
            rows.close()
    short: FinishReason = "context" if room < options.max_tokens else "length"
    ended_at = time.perf_counter()
    return [
        _beam(
            session,
            path,
            score=path.score(options.length_penalty),
            short=short,
            usage=Usage(
                prompt_tokens=len(prompt),
                cached_tokens=n_cached,
                completion_tokens=len(path.tokens),
                time_to_first_token_ms=(first_at - started) * 1e3,
                tokens_per_second=_rate(len(path.logprobs) - 1, ended_at - first_at),
                seed=None,
            ),
        )
        for path in search.finished[: options.n_return]
    ]


def _rate(n: int, seconds: float) -> float | None:
    return n / seconds if n > 0 and seconds > 0 else None


def _beam(
    session: CoreSession, path: Path, *, score: float, short: FinishReason, usage: Usage
) -> Beam:
    text = TextAssembler()
    pieces, before = session.pieces, [None, *path.tokens]
    shown = [
        text.push(b"" if pieces[token].is_control else pieces.shown(token, previous))
        for previous, token in zip(before, path.tokens)  # noqa: B905  (one more stands before)
    ]
    return Beam(
        text="".join(shown) + text.flush(),
        tokens=path.tokens,
        finish_reason=short if path.ended_by is None else "eos",
        usage=usage,
        logprobs=tuple(
            TokenLogprob(token=token, logprob=logprob)
            for token, logprob in zip(path.tokens, path.logprobs)  # noqa: B905  (the end's is last)
        ),
        score=score,
    )


class _InTurns:
    """Rows behind beams, each evaluated in the session's own sequence, one after the other.

    What two beams have in common is evaluated once for those that follow one another.
    """

    def __init__(self, session: CoreSession, prompt: list[int]) -> None:
        self._resident = session.resident
        self._prompt = prompt

    def first(self) -> FloatArray:
        """Return the row behind the prompt."""
        return np.array(self._resident.context.logits(-1), dtype=_FLOAT)

    def after(self, moves: Sequence[Any]) -> list[FloatArray]:
        """Return the row behind each of the beams that go on."""
        rows: list[Any] = [None] * len(moves)
        for place in sorted(range(len(moves)), key=lambda i: moves[i].path.tokens):
            self._resident.put_back([*self._prompt, *moves[place].path.tokens])
            self._resident.go_on()
            rows[place] = self.first()
        return rows

    def close(self) -> None:
        """Let go of nothing: the sequence is the session's."""


class _Together:
    """Rows behind beams, each in a sequence of its own, evaluated in one call where they fit."""

    def __init__(self, session: CoreSession, share: Any, prompt: list[int]) -> None:
        self._origin = cast("PagedContext", session.resident.context)
        self._share = share
        self._prompt = prompt
        self._beams: list[PagedContext] = []

    def first(self) -> FloatArray:
        """Return the row behind the prompt."""
        return np.array(self._origin.logits(-1), dtype=_FLOAT)

    def after(self, moves: Sequence[Any]) -> list[FloatArray]:
        """Return the row behind each of the beams that go on.

        The first that continues a beam stays in its sequence; the others are copied before.
        """
        before, self._beams = self._beams, []
        taken: set[int] = set()
        later = []
        for move in moves:
            if before and move.parent not in taken:
                taken.add(move.parent)
                self._beams.append(before[move.parent])
                continue
            beam = self._share.new_context()
            self._beams.append(beam)
            source = before[move.parent] if before else self._origin
            later.append((source, beam))
        for source, beam in later:
            source.copy_to(beam)
        for place, beam in enumerate(before):
            if place not in taken:
                beam.release()
        return self._evaluated([move.path.tokens[-1] for move in moves])

    def _evaluated(self, tokens: list[int]) -> list[FloatArray]:
        jobs = []
        for beam, token in zip(self._beams, tokens, strict=True):
            jobs.append(Job(beam.sequence, [token], n_keep=beam.n_tokens))
            beam.submit(jobs[-1])
        for job in jobs:
            job.wait()
        for job in jobs:
            if job.error is not None:
                raise job.error
        for beam in self._beams:
            beam.adopt()
        return [np.array(beam.logits(-1), dtype=_FLOAT) for beam in self._beams]

    def close(self) -> None:
        """Give the sequences back."""
        for beam in self._beams:
            beam.release()
        self._beams = []


# -- samples ---------------------------------------------------------------------------------------


def sample_many(session: CoreSession, configs: Sequence[DecodeConfig]) -> list[Completion]:
    """Return what a decode with each of ``configs`` gives behind a session that is held."""
    started = time.perf_counter()
    with _kept(session):
        together = len(configs) > 1 or session.resident.is_paged
        share = session.shared.sharing(session) if together else None
        if share is None:
            return _samples_in_turns(session, configs, started)
        return _samples_together(session, share, configs, started)


def seeded(config: DecodeConfig, n: int) -> list[DecodeConfig]:
    """Return ``n`` configs with the seeds from that of ``config`` on; drawn where it has none."""
    n_seeds = MAX_SEED + 1
    sampling = sampling_of(config)
    first = sampling.seed
    first = secrets.randbelow(n_seeds) if first is None else first
    seeds = [(first + i) % n_seeds for i in range(n)]
    return [attrs.evolve(config, sampling=attrs.evolve(sampling, seed=seed)) for seed in seeds]


def _samples_in_turns(
    session: CoreSession, configs: Sequence[DecodeConfig], started: float
) -> list[Completion]:
    state, parts = session.state, session.parts
    resident, most = session.resident, configs[0].max_tokens
    shifts = session.overflow == "shift" and (most is None or most > resident.free)
    go_back = resident.way_back(shifts=shifts)
    found = []
    for config in configs:
        session.enter(state, parts.copy())
        stream = DecodeStream(session, session.generation(config), started=started)
        try:
            found.append(_completion(stream.drain()))
        except CallTimeoutError:
            if not found:
                raise
            break
        finally:
            session.enter(state, parts)
            go_back()
        if found[-1].finish_reason == "cancelled":
            raise _cancelled(resident.n_wanted)
    return found + [_unbegun(config, resident.n_wanted) for config in configs[len(found) :]]


def _samples_together(
    session: CoreSession, share: Any, configs: Sequence[DecodeConfig], started: float
) -> list[Completion]:
    """Decode in forks, as many at once as have places; each reads in turn."""
    chunks: list[list[StreamChunk]] = [[] for _ in configs]
    late: CallTimeoutError | None = None
    waiting = list(reversed(range(len(configs))))
    reading: dict[int, tuple[CoreSession, Any]] = {}
    try:
        while waiting or reading:
            while waiting and len(reading) < share.n_places:
                place = waiting.pop()
                twin = session.twin_at(share.sibling())
                generation = twin.generation(configs[place])
                reading[place] = twin, twin.stream_of(generation, started=started)
            for place, (twin, stream) in list(reading.items()):
                if session.resident.cancelled:
                    raise _cancelled(session.resident.n_wanted)
                try:
                    chunks[place].append(next(stream))
                except CallTimeoutError as error:
                    late = error
                    waiting.clear()
                if stream.finished:
                    del reading[place]
                    twin.close()
    finally:
        for twin, stream in reading.values():
            stream.close()
            twin.close()
    if late is not None and not any(chunks):
        raise late
    n_prompt = session.resident.n_wanted
    return [
        _completion(one) if one else _unbegun(config, n_prompt)
        for one, config in zip(chunks, configs, strict=True)
    ]


def _completion(chunks: Sequence[StreamChunk]) -> Completion:
    """Return what a whole stream gave as one value."""
    last = chunks[-1]
    logprobs = [one for chunk in chunks for one in chunk.logprobs or ()]
    return Completion(
        text="".join(chunk.text for chunk in chunks),
        tokens=tuple(token for chunk in chunks for token in chunk.tokens),
        finish_reason=cast("FinishReason", last.finish_reason),
        usage=cast("Usage", last.usage),
        logprobs=None if last.logprobs is None else tuple(logprobs),
    )


def _unbegun(config: DecodeConfig, n_prompt: int) -> Completion:
    """Return a sample for which no time was left."""
    sampling = sampling_of(config)
    usage = Usage(
        prompt_tokens=n_prompt,
        cached_tokens=n_prompt,
        completion_tokens=0,
        time_to_first_token_ms=None,
        tokens_per_second=None,
        seed=sampling.seed,
        sampling=sampling,
    )
    logprobs = None if config.logprobs is None else ()
    return Completion(text="", tokens=(), finish_reason="timeout", usage=usage, logprobs=logprobs)


def _cancelled(n_tokens: int) -> DecodeAbortedError:
    return DecodeAbortedError(
        "the call was cancelled; the session is as it was", resident_tokens=n_tokens
    )


# -- the session they begin from -------------------------------------------------------------------


@contextmanager
def _kept(session: CoreSession) -> Iterator[tuple[list[int], int]]:
    """Hold the logical context with its logits, and again when the caller is done with it.

    Yields its tokens, and how many of them had not been evaluated since the decode before.
    """
    state, parts = session.state, session.parts.copy()
    _, n_cached = begin(session)
    if state == PREFIXED:
        parts.n_prefix = session.parts.n_prefix
    resident = session.resident
    tokens = resident.tape.tokens(0, resident.tape.logical)
    resident.checkpoint()
    session.enter(state, parts)
    try:
        yield tokens, n_cached
    finally:
        if not session.gate.closed and session.gate.fatal is None:
            resident.put_back(tokens)
