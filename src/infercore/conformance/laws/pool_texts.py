"""The texts of sessions that share an engine: those that each has alone."""

from __future__ import annotations

import re
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.conformance.expect import LawError, equal, that
from infercore.conformance.law import law
from infercore.conformance.pooling import Calls, follows_seed, text_of, together
from infercore.conformance.rig import generated, joined
from infercore.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infercore.conformance.rig import Rig


def _prompts(rig: Rig, n: int) -> list[str]:
    return [rig.passage(rig.random.randrange(6, 30)) for _ in range(n)]


def _follow(rig: Rig, prompts: Sequence[str], texts: Sequence[list[int]], what: str) -> None:
    for i, (prompt, tokens) in enumerate(zip(prompts, texts, strict=True)):
        rig.follows(rig.tokenizer.encode(prompt), tokens, f"{what}, session {i}")


def _bits(session: Any, prompt: str) -> list[float]:
    session.ensure_prefix(prompt)
    chunks = session.decode(max_tokens=16, temperature=0, ignore_eos=True, logprobs=0)
    return [told.logprob for chunk in chunks for told in chunk.logprobs or ()]


_CROWDS = 5
"""So often sessions are brought together before they are said never to be in each other's way."""


def _crowd(rig: Rig, **fields: Any) -> tuple[Any, list[str], list[list[int]]]:
    """Run sessions in a pool whose cells do not suffice for all of them."""
    prompts = [rig.passage(20) for _ in range(4)]
    pool = rig.pool(n_ctx=80, n_cells=96, n_parallel=4)

    def work(i: int) -> list[int]:
        asked = {name: value[i] for name, value in fields.items()}
        return text_of(pool.open_session(), prompts[i], 30, **asked)

    return pool, prompts, together(pool, work, range(4))


def _was_crowded(rig: Rig, pool: Any) -> None:
    """Leave where no session loses cells to another while it runs."""
    if pool.stats().n_cells >= 4 * 80:
        rig.leave("each session has cells of its own here: none loses them to another")
    if pool.effective["n_parallel"] == 1:
        rig.leave("the pool has one sequence: sessions take turns, each to its end")


def _rows(rig: Rig, spans: Sequence[tuple[int, Sequence[int], str]]) -> Any:
    context = rig.context(n_seq_max=4, n_ctx=4 * rig.n_ctx)
    context.decode_spans([(seq_id, tokens[:-1], "none") for seq_id, tokens, _ in spans])
    context.decode_spans([(seq_id, tokens[-1:], mode) for seq_id, tokens, mode in spans])
    return np.array([context.logits(i) for i in range(len(spans))])


def joined_of(session: Any, prompt: str, **fields: Any) -> str:
    """Return the greedy text after ``prompt``."""
    return _run(session, prompt, fields)[0]


def _run(session: Any, prompt: str, fields: dict[str, Any]) -> tuple[str, str, list[float]]:
    session.ensure_prefix(prompt)
    chunks = list(session.decode(temperature=0, ignore_eos=True, **fields))
    told = [one.logprob for chunk in chunks for one in chunk.logprobs or ()]
    return joined(chunks), chunks[-1].finish_reason, told


def _more(session: Any) -> list[int]:
    return generated(list(session.decode(max_tokens=6, temperature=0, ignore_eos=True)))


@law("POOL-1", tier="process", since="1.2")
def check_greedy_texts_together(rig: Rig) -> None:
    """Sessions of a pool, each in its thread, give the greedy texts that each gives alone."""
    pool, prompts = rig.pool(), _prompts(rig, 6)
    sessions = [pool.open_session() for _ in prompts]
    for turn in ("first", "second"):
        texts = together(pool, lambda i: text_of(sessions[i], prompts[i], 12), range(6))
        equal([len(text) for text in texts], [12] * 6, f"tokens of the {turn} turn")
        _follow(rig, prompts, texts, f"the {turn} turn")


@law("POOL-2", tier="process", since="1.2")
def check_seeded_texts_together(rig: Rig) -> None:
    """Sessions that sample at the same time each get the tokens their seed gives alone."""
    pool, prompts = rig.pool(), _prompts(rig, 4)
    fields = [{"temperature": 1.0, "seed": 11 + i} for i in range(4)]

    def work(i: int) -> list[int]:
        return text_of(pool.open_session(), prompts[i], 16, **fields[i])

    for i, tokens in enumerate(together(pool, work, range(4))):
        ids = rig.tokenizer.encode(prompts[i])
        follows_seed(rig, ids, tokens, f"session {i}", **fields[i])


@law("POOL-3", tier="process", needs="multi_sequence", since="1.2")
def check_calls_are_shared(rig: Rig) -> None:
    """Sessions that generate at once meet in engine calls: one token each in a call."""
    with Calls(rig) as calls:
        pool, prompts = rig.pool(), _prompts(rig, 4)
        together(pool, lambda prompt: text_of(pool.open_session(), prompt, 40), prompts)
        shared = [call for call in calls.made if len(call) > 1]
        that(len(shared) >= 20, f"{len(shared)} of {len(calls.made)} calls were shared")  # noqa: PLR2004
        that(pool.stats().mean_batch > 1, f"mean_batch is {pool.stats().mean_batch}")


@law("POOL-4", needs="multi_sequence", since="1.2")
def check_the_same_calls_twice(rig: Rig) -> None:
    """The same calls of several sequences, made twice, give the same bits."""
    spans = [(i, rig.tokens(5 + i), "last") for i in range(4)]
    rig.same_bits(_rows(rig, spans), _rows(rig, spans), "rows of the same calls")


@law("POOL-5", needs="multi_sequence", since="1.2")
def check_neighbours_do_not_matter(rig: Rig) -> None:
    """The other sequences of a call do not change a bit of a row."""
    own = [(0, rig.tokens(6), "last")]
    first = own + [(i, rig.tokens(6), "last") for i in range(1, 4)]
    second = own + [(i, rig.tokens(6), "last") for i in range(1, 4)]
    that(first != second, "the neighbours say the same")
    rig.same_bits(_rows(rig, first)[0], _rows(rig, second)[0], "a row beside other neighbours")


@law("POOL-6", tier="process", since="1.2")
def check_batch_invariance(rig: Rig) -> None:
    """batch_invariant=True gives the bits of the session alone, or is refused at opening."""
    try:
        alone = rig.pool(batch_invariant=True, batching="auto")
    except UnsupportedFeatureError:
        return
    prompts = _prompts(rig, 3)
    bits = [_bits(alone.open_session(), prompts[0])]
    busy = rig.pool(batch_invariant=True, batching="auto")
    bits.append(together(busy, lambda p: _bits(busy.open_session(), p), prompts)[0])
    equal(bits[1], bits[0], "log-probabilities beside others, bit by bit")
    tight = rig.pool(batch_invariant=True, batching="auto", n_cells=64, n_ctx=64, n_parallel=2)
    crowded = together(tight, lambda p: _bits(tight.open_session(), p), prompts)
    equal(crowded[0], bits[0], "log-probabilities where cells were lost")


@law("POOL-7", tier="process", since="1.2")
def check_preempted_texts(rig: Rig) -> None:
    """Sessions that lose their cells to others while running give the same greedy texts."""
    for _ in range(_CROWDS):  # a fast engine may be done with one before another begins
        pool, prompts, texts = _crowd(rig)
        _follow(rig, prompts, texts, "with too few cells")
        _was_crowded(rig, pool)
        if pool.stats().n_preempted:
            return
    raise LawError("no session lost its cells, though there are too few")


@law("POOL-8", tier="process", since="1.2")
def check_preempted_seeds(rig: Rig) -> None:
    """A session that lost its cells draws no random number twice."""
    fields: dict[str, list[Any]] = {"temperature": [1.0] * 4, "seed": [3, 5, 7, 9]}
    for _ in range(_CROWDS):
        pool, prompts, texts = _crowd(rig, **fields)
        for i, tokens in enumerate(texts):
            ids = rig.tokenizer.encode(prompts[i])
            follows_seed(rig, ids, tokens, f"session {i}", temperature=1.0, seed=fields["seed"][i])
        _was_crowded(rig, pool)
        if pool.stats().n_preempted:
            return
    raise LawError("no session lost its cells, though there are too few")


@law("POOL-9", tier="process", since="1.2")
def check_options_are_each_ones_own(rig: Rig) -> None:
    """Stop strings, limits, penalties, bias and log-probabilities act on their own session."""
    prompt = rig.passage(12)
    plain = joined_of(rig.session(), prompt, max_tokens=24)
    cut = plain[len(plain) // 2 :][:3]
    asked: list[dict[str, Any]] = [
        {"max_tokens": 24},
        {"max_tokens": 24, "stop": [cut]} if cut.strip() else {"max_tokens": 9},
        {"max_tokens": 24, "repeat_penalty": 1.7},
        {"max_tokens": 7, "logprobs": 2},
        {"max_tokens": 24, "logit_bias": dict.fromkeys(rig.tokenizer.encode(plain)[:4], -100.0)},
    ]
    alone = [_run(rig.session(), prompt, one) for one in asked]
    that(len({text for text, _, _ in alone}) > 1, "the options make no difference")
    for order in (range(5), (4, 2, 0, 3, 1)):
        pool = rig.pool(n_parallel=5)
        sessions = [pool.open_session() for _ in order]
        runs = [partial(_run, sessions[i], prompt, asked[i]) for i in order]
        found = together(pool, lambda run: run(), runs)
        for i, one in zip(order, found, strict=True):
            equal(one[:2], alone[i][:2], f"text and end with {asked[i]}")
            rig.near(one[2], alone[i][2], f"log-probabilities with {asked[i]}")


@law("POOL-10", tier="process", since="1.2")
def check_constraints_are_each_ones_own(rig: Rig) -> None:
    """A constraint binds its own session, beside free ones and other constraints."""
    pool = rig.pool()
    patterns = [r"[ab]{4,8}", r"[0-9]{4,8}", None, r"(yes|no)"]

    def work(pattern: str | None) -> str:
        session = pool.open_session()
        session.ensure_prefix(rig.story[:40])
        asked = (
            {} if pattern is None else {"response_format": {"type": "regex", "pattern": pattern}}
        )
        return joined(list(session.decode(max_tokens=24, temperature=1.0, seed=4, **asked)))

    try:
        texts = together(pool, work, patterns)
    except UnsupportedFeatureError as error:
        rig.leave(str(error))
    for pattern, text in zip(patterns, texts, strict=True):
        fits = pattern is None or re.fullmatch(pattern, text)
        that(fits, f"{text!r} does not fit {pattern}")


@law("POOL-11", tier="session", since="1.2")
def check_forks_in_a_pool(rig: Rig) -> None:
    """A fork in a pool continues from where its source is; from there they are independent."""
    prompt = rig.passage(12)
    session = rig.pool().open_session()
    start = text_of(session, prompt, 6)
    with session.fork() as twin:
        ids = rig.tokenizer.encode(prompt) + start
        texts = [generated(list(s.decode(max_tokens=8, temperature=0, ignore_eos=True)))
                 for s in (twin, session)]  # fmt: skip
        rig.follows(ids, texts[0], "the fork")
        rig.follows(ids, texts[1], "its source")


@law("POOL-12", tier="process", since="1.2")
def check_forks_at_once(rig: Rig) -> None:
    """Forks may generate in threads of their own at once."""
    prompt, pool = rig.passage(14), rig.pool()
    session = pool.open_session()
    session.ensure_prefix(prompt)
    forks = [session.fork() for _ in range(3)]

    def work(i: int) -> list[int]:
        return generated(
            list(forks[i].decode(max_tokens=12, temperature=1.0, seed=i, ignore_eos=True))
        )

    ids = rig.tokenizer.encode(prompt)
    for i, tokens in enumerate(together(pool, work, range(3))):
        follows_seed(rig, ids, tokens, f"fork {i}", temperature=1.0, seed=i)


@law("POOL-13", tier="session", needs="sequence_state", since="1.2")
def check_snapshots_in_and_out(rig: Rig) -> None:
    """A pool's snapshot restores in a single session, and a single session's in a pool."""
    prompt = rig.passage(12)
    pooled, single = rig.pool().open_session(), rig.model.new_session(**rig.fields())
    rig.opened(single)
    start = text_of(pooled, prompt, 5)
    single.restore(pooled.snapshot())
    ids = rig.tokenizer.encode(prompt) + start
    more = generated(list(single.decode(max_tokens=5, temperature=0, ignore_eos=True)))
    rig.follows(ids, more, "a single session")
    other = rig.pool().open_session()
    other.restore(single.snapshot())
    rig.follows(ids + more, _more(other), "the session of another pool")


@law("POOL-14", tier="process", since="1.2")
def check_a_seed_under_changing_load(rig: Rig) -> None:
    """A seed gives the same text whatever runs beside it."""
    prompt = rig.passage(16)
    ids = rig.tokenizer.encode(prompt)
    pool = rig.pool()
    for load in (0, 1, 3, 2):
        stop = threading.Event()
        beside = [pool.open_session() for _ in range(load)]

        def busy(session: Any, stop: threading.Event = stop) -> None:
            text = rig.story[:60]
            while not stop.is_set():
                text_of(session, text, 8)

        threads = [threading.Thread(target=busy, args=(one,), daemon=True) for one in beside]
        for thread in threads:
            thread.start()
        try:
            tokens = text_of(pool.open_session(), prompt, 16, temperature=1.0, seed=77)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        follows_seed(rig, ids, tokens, f"beside {load} others", temperature=1.0, seed=77)
