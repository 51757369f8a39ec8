"""Choosing tokens."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.conformance.expect import equal, raises, that
from infercore.conformance.law import law
from infercore.conformance.rig import generated, greedy
from infercore.errors import InvalidInputError, InvalidTokenError, OutputNotAvailableError

if TYPE_CHECKING:
    from infercore.conformance.rig import Rig

PLAIN: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
OPEN: dict[str, Any] = {**PLAIN, "temperature": 4.0}
"""So warm that any token may come, however sure the model is."""


def _row(rig: Rig) -> tuple[Any, Any]:
    context = rig.context()
    context.decode(rig.tokens(6))
    return context, context.logits().astype(np.float64)


def _warm(row: Any, least: float) -> float:
    """Return a temperature at which several tokens come, however sure the model is."""
    order = np.sort(row)[::-1]
    return max(least, float(order[0] - order[4]) / 2)


def _best(row: Any, n: int) -> list[int]:
    return [int(token) for token in np.argsort(-row, kind="stable")[:n]]


def _drawn(rig: Rig, context: Any, n: int, **fields: Any) -> list[int]:
    return [int(rig.sampler(**fields, seed=seed).sample(context)) for seed in range(n)]


@law("SAMP-1")
def check_temperature_zero(rig: Rig) -> None:
    """Temperature 0 takes the likeliest token, whatever else is set."""
    context, row = _row(rig)
    best = _best(row, 1)
    for fields in ({}, {"seed": 5}, {"top_k": 3, "top_p": 0.1}, {"xtc_probability": 1.0}):
        token = rig.sampler(temperature=0, **fields).sample(context)
        equal([token], best, f"the token with {fields}")


@law("SAMP-2")
def check_seed_repeats(rig: Rig) -> None:
    """The same seed gives the same tokens; a seed that was drawn is reported and repeats them."""
    context, _ = _row(rig)
    drawn = rig.sampler(**OPEN)
    that(drawn.seed is not None and 0 <= drawn.seed < 2**32 - 1, f"the seed {drawn.seed}")
    tokens = [drawn.sample(context) for _ in range(12)]
    again = rig.sampler(**OPEN, seed=drawn.seed)
    equal([again.sample(context) for _ in range(12)], tokens, "tokens of the same seed")
    equal(rig.sampler(seed=7).seed, 7, "the seed asked for")


@law("SAMP-3")
def check_seeds_differ(rig: Rig) -> None:
    """Different seeds give different tokens where the model leaves a choice."""
    context, row = _row(rig)
    runs, warm = set(), _warm(row, 2.0)
    for seed in range(6):
        sampler = rig.sampler(**PLAIN | {"temperature": warm}, seed=seed)
        runs.add(tuple(sampler.sample(context) for _ in range(12)))
    that(len(runs) > 1, "six seeds gave the same twelve tokens")


@law("SAMP-4")
def check_top_k(rig: Rig) -> None:
    """top_k stays within the k likeliest tokens; top_k=1 is the likeliest."""
    context, row = _row(rig)
    warm = _warm(row, 5.0)
    drawn = _drawn(rig, context, 40, **PLAIN | {"top_k": 5, "temperature": warm})
    equal(set(drawn) - set(_best(row, 5)), set(), "tokens outside the 5 likeliest")
    that(len(set(drawn)) > 1, f"40 seeds at temperature {warm:.3g} gave one token")
    equal(_drawn(rig, context, 5, top_k=1), _best(row, 1) * 5, "tokens with top_k=1")


@law("SAMP-5")
def check_top_p_and_min_p(rig: Rig) -> None:
    """top_p and min_p leave out exactly the tokens they should."""
    context, row = _row(rig)
    p = np.exp(row - row.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    n_kept = int(np.searchsorted(np.cumsum(p[order]), 0.5)) + 1
    inside = {int(token) for token in order[: n_kept + 1]}
    drawn = _drawn(rig, context, 30, **PLAIN | {"top_p": 0.5})
    equal(set(drawn) - inside, set(), "tokens outside top_p")
    inside = {int(token) for token in np.flatnonzero(p >= 0.299 * p.max())}
    drawn = _drawn(rig, context, 30, **PLAIN | {"min_p": 0.3})
    equal(set(drawn) - inside, set(), "tokens outside min_p")


@law("SAMP-6")
def check_bias(rig: Rig) -> None:
    """A bias of -inf is never sampled, one of +100 always."""
    context, row = _row(rig)
    first, second = _best(row, 2)
    never = _drawn(rig, context, 25, **PLAIN, logit_bias={first: -np.inf})
    that(first not in never, "a token with a bias of -inf was sampled")
    rare = _best(-row, 1)[0]
    always = _drawn(rig, context, 10, **PLAIN, logit_bias={rare: 100.0})
    equal(set(always), {rare}, "tokens with a bias of +100")
    token = rig.sampler(temperature=0, logit_bias={first: -np.inf}).sample(context)
    equal(token, second, "the likeliest token but one that is excluded")


@law("SAMP-7")
def check_one_accept(rig: Rig) -> None:
    """A sample is accepted exactly once: penalties count it once."""
    context, row = _row(rig)
    first, second = _best(row, 2)
    gap = float(row[first] - row[second])
    if gap <= 0:
        rig.leave("the two likeliest tokens are alike")
    sampler = rig.sampler(temperature=0, frequency_penalty=0.75 * gap)
    tokens = [sampler.sample(context) for _ in range(3)]
    equal(tokens, [first, first, second], "tokens with a penalty of three quarters of the gap")


@law("SAMP-8")
def check_observe(rig: Rig) -> None:
    """Tokens that are observed count for penalties as sampled ones do."""
    context, row = _row(rig)
    first, second = _best(row, 2)
    gap = float(row[first] - row[second])
    if gap <= 0:
        rig.leave("the two likeliest tokens are alike")
    sampler = rig.sampler(temperature=0, presence_penalty=1.5 * gap)
    sampler.observe([first])
    equal(sampler.sample(context), second, "the token after the likeliest was observed")
    sampler.reset()
    equal(sampler.sample(context), first, "the token after a reset")


@law("SAMP-9")
def check_clone(rig: Rig) -> None:
    """A clone continues as its source would have, and independently of it."""
    context, _ = _row(rig)
    sampler = rig.sampler(**OPEN, seed=3)
    for _ in range(3):
        sampler.sample(context)
    clone = rig.opened(sampler.clone())
    expected = [sampler.sample(context) for _ in range(8)]
    equal([clone.sample(context) for _ in range(8)], expected, "tokens of the clone")


@law("SAMP-10")
def check_reset(rig: Rig) -> None:
    """After a reset a sampler does again what it did at first."""
    context, _ = _row(rig)
    sampler = rig.sampler(**OPEN, seed=4, frequency_penalty=0.5)
    first = [sampler.sample(context) for _ in range(8)]
    sampler.reset()
    equal([sampler.sample(context) for _ in range(8)], first, "tokens after a reset")


@law("SAMP-11")
def check_distribution(rig: Rig) -> None:
    """At temperature 1 tokens come as often as their probabilities say."""
    context, row = _row(rig)
    p = np.exp(row - row.max())
    p /= p.sum()
    sampler = rig.sampler(**PLAIN, seed=12)
    n = 400
    counts = Counter(sampler.sample(context) for _ in range(n))
    for token in _best(row, 4):
        expected = n * p[token]
        allowed = 5 * np.sqrt(expected * (1 - p[token])) + 2
        gap = abs(counts[token] - expected)
        that(gap <= allowed, f"token {token}: {counts[token]} of {n}, expected {expected:.0f}")


@law("SAMP-12")
def check_ignore_eos(rig: Rig) -> None:
    """ignore_eos never lets an end-of-generation token through, and changes no other choice."""
    context, row = _row(rig)
    ends = [t for t in (rig.tokenizer.eos, rig.tokenizer.eot) if t is not None]
    if not ends:
        rig.leave("the vocabulary has no end token")
    bias = dict.fromkeys(ends, 50.0)
    drawn = _drawn(rig, context, 20, **PLAIN, logit_bias=bias, ignore_eos=True)
    equal([t for t in drawn if rig.tokenizer.is_eog(t)], [], "end tokens that were sampled")
    token = rig.sampler(temperature=0, logit_bias={ends[0]: 1000.0}).sample(context)
    equal(token, ends[0], "the end token with a bias, not ignored")
    best = max((t for t in range(len(row)) if not rig.tokenizer.is_eog(t)), key=row.__getitem__)
    token = rig.sampler(temperature=0, logit_bias=bias, ignore_eos=True).sample(context)
    equal(token, best, "the likeliest token that is no end")


@law("SAMP-13", needs="kv_remove")
def check_no_sample_of_stale_logits(rig: Rig) -> None:
    """Sampling from logits that are gone raises OutputNotAvailableError, and accepts nothing."""
    context, _ = _row(rig)
    sampler = rig.sampler(**PLAIN, seed=9)
    context.seq_remove(0, 4, -1)
    raises(OutputNotAvailableError, lambda: sampler.sample(context), "a sample of stale logits")
    raises(OutputNotAvailableError, lambda: sampler.sample(rig.context()), "a sample of nothing")


@law("SAMP-14")
def check_bad_sampling(rig: Rig) -> None:
    """An invalid sampling option raises InvalidInputError."""
    for fields in ({"seed": -1}, {"seed": 2**32}, {"top_p": 1.5}, {"temperature": float("nan")}):
        raises(InvalidInputError, lambda f=fields: rig.sampler(**f), f"sampler({fields})")
    bias = {rig.tokenizer.n_vocab: 1.0}
    raises(InvalidTokenError, lambda: rig.sampler(logit_bias=bias), "a bias of no token")


@law("SAMP-15", needs="logits_all")
def check_sampling_a_row(rig: Rig) -> None:
    """Any output row can be sampled from."""
    context = rig.context()
    context.decode(rig.tokens(5), logits="all")
    for i in (0, 2, -1):
        best = int(context.logits(i).argmax())
        equal(rig.sampler(temperature=0).sample(context, i), best, f"the token of row {i}")


@law("SAMP-16", tier="session")
def check_session_seed(rig: Rig) -> None:
    """A session's decode repeats with the seed that it reported."""
    session, text = rig.session(), rig.passage(8)
    fields = {"max_tokens": 12, "temperature": 1.5, "ignore_eos": True}
    session.ensure_prefix(text)
    first = list(session.decode(**fields))
    seed = first[-1].usage.seed
    session.ensure_prefix(text)
    again = list(session.decode(**fields, seed=seed))
    equal(generated(again), generated(first), "the tokens with the seed that was reported")


@law("SAMP-17", tier="session")
def check_session_penalties_see_the_prompt(rig: Rig) -> None:
    """Penalties of a session's decode count the prompt's tokens."""
    session, text = rig.session(), rig.passage(8)
    session.ensure_prefix(text)
    ids = rig.tokenizer.encode(text)
    plain = greedy(session, 1)[0]
    session.ensure_prefix(text)
    strong = greedy(session, 10, presence_penalty=1000.0, penalty_last_n=-1)
    equal(set(strong) & set(ids), set(), "prompt tokens that came again")
    equal(len(set(strong)), 10, f"different tokens after {plain}")


@law("SAMP-18", needs="native_sampler")
def check_native_is_as_portable(rig: Rig) -> None:
    """The engine's own sampler has the same candidates as the portable one."""
    context, row = _row(rig)
    native = {"implementation": "native"}
    token = rig.sampler(**native, temperature=0).sample(context)
    equal([token], _best(row, 1), "the token at temperature 0")
    drawn = _drawn(rig, context, 30, **native, **PLAIN | {"top_k": 4, "temperature": 3.0})
    equal(set(drawn) - set(_best(row, 4)), set(), "tokens outside the 4 likeliest")
    never = _drawn(rig, context, 10, **native, **PLAIN, logit_bias={_best(row, 1)[0]: -np.inf})
    that(_best(row, 1)[0] not in never, "a token with a bias of -inf was sampled")


@law("SAMP-19", needs="native_sampler")
def check_native_seed_and_accept(rig: Rig) -> None:
    """The engine's own sampler repeats with its seed, and accepts each sample once."""
    context, row = _row(rig)
    fields = {"implementation": "native", **PLAIN, "seed": 21}
    runs = []
    for _ in range(2):
        sampler = rig.sampler(**fields)
        runs.append([sampler.sample(context) for _ in range(8)])
    equal(runs[0], runs[1], "tokens of the same seed")
    first, second = _best(row, 2)
    gap = float(row[first] - row[second])
    if gap > 0:
        once = rig.sampler(implementation="native", temperature=0, frequency_penalty=0.75 * gap)
        tokens = [once.sample(context) for _ in range(3)]
        equal(tokens, [first, first, second], "tokens with a penalty of three quarters of the gap")


_FILTERS: tuple[dict[str, Any], ...] = (
    {"top_k": 5, "temperature": 2.0},
    {"top_p": 0.8},
    {"min_p": 0.2, "temperature": 1.5},
    {"typical_p": 0.6},
    {"top_n_sigma": 1.0, "top_k": 20},
    {"temperature": 2.0, "dynatemp_range": 1.0},
    {"xtc_probability": 1.0, "xtc_threshold": 0.05, "temperature": 2.0},
    {"repeat_penalty": 1.7},
)


@law("SAMP-21", needs="native_sampler", since="1.1")
def check_native_distribution(rig: Rig) -> None:
    """The engine's own sampler draws, through each filter, as often as the portable one says."""
    context, row = _row(rig)
    seen = _best(row, 3)
    penalty = float(row[seen[0]] - row[_best(row, 6)[-1]])
    n = 150
    for fields in (*_FILTERS, {"presence_penalty": penalty, "frequency_penalty": 0.3}):
        asked = {**PLAIN, **fields, "seed": 31}
        portable = rig.sampler(**asked)
        portable.observe(seen)
        ids, p = portable.distribution(context.logits())
        expected = dict(zip(ids.tolist(), p.tolist(), strict=True))
        counts: Counter[int] = Counter()
        for seed in range(n):
            native = rig.sampler(**{**asked, "seed": seed, "implementation": "native"})
            native.observe(seen)
            counts[native.sample(context)] += 1
        outside = {token: count for token, count in counts.items() if token not in expected}
        equal(outside, {}, f"tokens drawn with {fields} that the portable sampler leaves out")
        for token, share in expected.items():
            allowed = 5 * np.sqrt(n * share * (1 - share)) + 2
            gap = abs(counts[token] - n * share)
            that(gap <= allowed, f"{fields}, token {token}: {counts[token]} of {n}, p={share:.3f}")


@law("SAMP-20", tier="session")
def check_processors(rig: Rig) -> None:
    """A caller's processor sees a copy of the logits, and what it returns is sampled from."""
    seen: list[Any] = []

    class Turned:
        def apply(self, logits: Any) -> Any:
            seen.append((logits.dtype.name, logits.shape))
            return -logits

    session, text = rig.session(), rig.passage(6)
    session.ensure_prefix(text)
    token = greedy(session, 1, processors=[Turned()])[0]
    row = rig.cold(rig.tokenizer.encode(text))
    gap = float(row[token] - row.min())
    that(gap <= 2 * rig.tolerance, f"the token is {gap:.3g} above the least likely one")
    equal(seen, [("float32", (rig.tokenizer.n_vocab,))], "what the processor saw")
