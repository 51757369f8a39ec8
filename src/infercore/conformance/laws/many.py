"""Beams and samples: many continuations of one session."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from infercore.conformance.expect import equal, raises, that
from infercore.conformance.law import law
from infercore.conformance.rig import generated, greedy, joined
from infercore.errors import InvalidInputError, InvalidStateError
from infercore.values.config import MAX_SEED

if TYPE_CHECKING:
    from infercore.conformance.rig import Rig

N_BEAMS, N_TOKENS = 3, 3
N_TRIES = 150
"""Few passages have beams that can be told apart."""
_SAMPLED: dict[str, Any] = {"max_tokens": 6, "temperature": 1.5, "top_k": 0, "top_p": 1.0}

Path = tuple[float, tuple[int, ...]]


def _sessions(rig: Rig) -> list[Any]:
    """Return a session of one sequence, and one that evaluates together where there is such."""
    found = [rig.session()]
    if not rig.in_pool and rig.context().capabilities.multi_sequence:
        found.append(rig.session(n_seq_max=4, n_ctx=4 * rig.n_ctx))
    return found


def _logical(session: Any) -> Any:
    """Return what a session reports, but for what it holds beyond its context."""
    return attrs.evolve(session.explain_context(), held_tokens=0, warm_tail_tokens=0)


def _probabilities(rig: Rig, tokens: list[int]) -> Any:
    row = rig.cold(tokens).astype(np.float64)
    row -= row.max()
    return row - np.log(np.exp(row).sum())


def _searched(rig: Rig, prompt: list[int]) -> list[Path] | None:
    """Return the best beams by trying all, None where one ends or two are too near to tell."""
    beams: list[Path] = [(0.0, ())]
    for _ in range(N_TOKENS):
        found: list[Path] = []
        for total, tokens in beams:
            row = _probabilities(rig, [*prompt, *tokens])
            best = np.argsort(-row, kind="stable")[: 2 * N_BEAMS].tolist()
            found += [(total + float(row[token]), (*tokens, token)) for token in best]
        found.sort(key=lambda beam: -beam[0])
        first = found[: N_BEAMS + 1]
        gaps = [one[0] - two[0] for one, two in pairwise(first)]
        ends = any(rig.tokenizer.is_eog(tokens[-1]) for _, tokens in found[: 2 * N_BEAMS])
        if ends or min(gaps) < 8 * rig.tolerance + 1e-6:
            return None
        beams = first[:N_BEAMS]
    return beams


@law("STREAM-23", tier="session", since="1.2")
def check_beams_are_the_likeliest(rig: Rig) -> None:
    """Beams are the likeliest continuations that a search by hand finds, with their scores."""
    n_searched = 0
    for _ in range(N_TRIES):
        text = rig.passage(8)
        wanted = _searched(rig, rig.tokenizer.encode(text))
        if wanted is None:
            continue
        for session in _sessions(rig):
            session.ensure_prefix(text)
            beams = session.beam_search(N_BEAMS, max_tokens=N_TOKENS, n_return=N_BEAMS)
            equal([beam.tokens for beam in beams], [tokens for _, tokens in wanted], "the beams")
            for beam, (total, _) in zip(beams, wanted, strict=True):
                gap = abs(beam.score - total / N_TOKENS)
                that(gap <= 2 * rig.tolerance + 1e-5, f"the score of a beam is {gap:.3g} off")
                of_each = sum(one.logprob for one in beam.logprobs) / N_TOKENS
                that(abs(of_each - beam.score) < 1e-6, "the score is not that of its logprobs")  # noqa: PLR2004
                shown = [t for t in beam.tokens if not rig.tokenizer.is_control(t)]
                equal(beam.text, rig.tokenizer.decode(shown), "the text of a beam")
        n_searched += 1
        if n_searched == 2:  # noqa: PLR2004
            return
    told = f"no passage has beams that a tolerance of {rig.tolerance:g} tells apart"
    that(n_searched, f"{told}: lower it, or give the rig another story")


@law("STREAM-24", tier="session", since="1.2")
def check_beams_leave_the_session(rig: Rig) -> None:
    """A search returns at most what was requested, best first, and leaves the session as it was."""
    text = rig.passage(8)
    for session in _sessions(rig):
        raises(InvalidStateError, lambda s=session: s.beam_search(2, max_tokens=2), "on nothing")
        session.ensure_prefix(text)
        before = _logical(session)
        for penalty in (0.0, 2.0):
            beams = session.beam_search(4, max_tokens=5, n_return=3, length_penalty=penalty)
            equal(len(beams), 3, "beams given")
            scores = [beam.score for beam in beams]
            equal(scores, sorted(scores, reverse=True), "the order of the scores")
            for beam in beams:
                ended = beam.finish_reason == "eos"  # by a token that only the score counts
                n = len(beam.tokens) + ended
                that(ended or n == 5, f"{n} tokens and finish_reason {beam.finish_reason!r}")  # noqa: PLR2004
                that(n <= 5, f"{n} tokens of 5 at most")  # noqa: PLR2004
                found = sum(one.logprob for one in beam.logprobs) / n**penalty
                near = beam.score <= found + 1e-6 if ended else abs(found - beam.score) < 1e-6  # noqa: PLR2004
                that(near, f"the score with {penalty=}")
        for wrong in ({"n_beams": 0}, {"n_return": 5}, {"max_tokens": 0}):
            asked = {"n_beams": 2, "max_tokens": 2, **wrong}
            raises(InvalidInputError, lambda s=session, a=asked: s.beam_search(**a), f"{wrong}")
        equal(_logical(session), before, "the report afterwards")
        rig.follows(rig.tokenizer.encode(text), greedy(session, 4), "after a search")


@law("STREAM-25", tier="session", since="1.2")
def check_samples_are_those_of_their_seeds(rig: Rig) -> None:
    """Samples are what each seed gives alone, and the session stays as it was."""
    text, last = rig.passage(8), MAX_SEED
    for session in _sessions(rig):
        session.ensure_prefix(text)
        before = _logical(session)
        found = session.sample_many(3, seed=last - 1, **_SAMPLED)
        equal([one.usage.seed for one in found], [last - 1, last, 0], "the seeds")
        equal(_logical(session), before, "the report afterwards")
        for one in found:
            session.ensure_prefix(text)
            chunks = list(session.decode(seed=one.usage.seed, **_SAMPLED))
            alone = (joined(chunks), tuple(generated(chunks)), chunks[-1].finish_reason)
            equal((one.text, one.tokens, one.finish_reason), alone, "a sample beside its seed's")
        for n in (0, -1, 1.5):
            raises(InvalidInputError, lambda s=session, n=n: s.sample_many(n), f"{n} samples")
        session.ensure_prefix(text)
        rig.follows(rig.tokenizer.encode(text), greedy(session, 4), "after samples")
