"""Logits beside an oracle's: long texts, every size of a step, programs of calls."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.conformance import programs
from infercore.conformance.authors import Kinds, draw
from infercore.conformance.expect import raises, that
from infercore.conformance.law import law
from infercore.conformance.laws.cancel import AfterCalls
from infercore.errors import DecodeAbortedError, InvalidInputError, UnsupportedFeatureError

if TYPE_CHECKING:
    from infercore.conformance.oracle import Oracle
    from infercore.conformance.rig import Rig

N_SINGLES = 12
LONG = 640
MAX_LOGITS = 2**24
"""Of one call: an engine holds them all."""


DECODES = "append append singles singles "
MOVES = "cut again hole head shift shift close close divide "
SEVERAL = "copy copy batch batch several several end "
SAVES = "through_bytes through_bytes all_through_bytes all_through_bytes "


def _programs(rig: Rig, phrases: str, n: int, *, n_steps: int = 12, **sizes: int) -> None:
    for _ in range(n):
        programs.check(rig, draw(rig, Kinds(phrases=phrases, **sizes), n_steps))


def _expected(rig: Rig, tokens: list[int]) -> Any:
    """Return the row of each token: the oracle's, else those of one call in a cold context."""
    oracle = rig.live_oracle()
    if oracle is not None:
        return oracle.rows(tokens)
    context = rig.context(n_ctx=len(tokens), n_batch=len(tokens), n_ubatch=len(tokens))
    context.decode(tokens, logits="all")
    return np.array(context.logits_all())


def window(rig: Rig) -> int:
    """Return a window past the blocks and tables of engines, as far as the model was trained."""
    trained: int = rig.model.info.n_ctx_train or LONG
    n_rows: int = MAX_LOGITS // rig.tokenizer.n_vocab
    return max(rig.n_ctx, min(LONG, trained, n_rows))


@law("DEC-22", needs="logits_all", since="1.2")
def check_the_whole_window(rig: Rig) -> None:
    """A text that nearly fills a long window, then single tokens, give the oracle's logits."""
    n_ctx = window(rig)
    tokens = rig.story_at(rig.random.randrange(1000), n_ctx)
    expected = _expected(rig, tokens)
    context = rig.context(n_ctx=n_ctx)
    n = n_ctx - N_SINGLES
    context.decode(tokens[:n], logits="all")
    rig.near(context.logits_all(), expected[:n], f"each row of {n} tokens")
    for i, token in enumerate(tokens[n:], start=n):
        context.decode_one(token)
        rig.near(context.logits(), expected[i], f"token {i} of a window of {n_ctx}")


@law("DEC-23", needs="logits_all", since="1.2")
def check_every_size_of_a_step(rig: Rig) -> None:
    """Steps and calls of any size, the last ones partial, give each token the oracle's logits."""
    for i in range(6):
        n_batch = rig.random.choice((3, 5, 8, 13, 20, 32, 50, 65))
        n_ubatch = rig.random.randint(1, n_batch)
        rest = rig.random.randint(1, n_batch)
        if i < 2:  # noqa: PLR2004  (the last call has a whole step, and a part of one)
            n_ubatch = rig.random.randint(2, n_batch - 1)
            rest = rig.random.randint(n_ubatch + 1, min(n_batch, 2 * n_ubatch - 1))
        n = min(rig.n_ctx, rig.random.choice((2, 3)) * n_batch + rest)
        tokens = rig.story_at(rig.random.randrange(1000), n)
        expected = _expected(rig, tokens)
        what = f"{n} tokens with n_batch={n_batch} and n_ubatch={n_ubatch}"
        context = rig.context(n_batch=n_batch, n_ubatch=n_ubatch)
        context.decode(tokens, logits="all")
        rig.near(context.logits_all(), expected, f"each row of {what}")
        context.clear()
        context.decode(tokens)
        rig.near(context.logits(), expected[-1], f"the last row of {what}")


@law("DEC-24", needs="multi_sequence", since="1.2")
def check_sequences_of_unequal_length(rig: Rig) -> None:
    """Four sequences of unequal length in one batch, rows wanted in any order, give the oracle's.

    The batch comes in two calls; then they go on one token at a time by turns.
    """
    n_seq, n_more = 4, 3
    sizes = [rig.random.randint(1, 9) + 7 * s for s in range(n_seq)]
    rig.random.shuffle(sizes)
    texts = [rig.story_at(rig.random.randrange(1000), n + n_more) for n in sizes]
    expected = [_expected(rig, text) for text in texts]
    order = [s for s, n in enumerate(sizes) for _ in range(n)]
    rig.random.shuffle(order)
    places, wanted = [0] * n_seq, []
    entries: list[tuple[int, tuple[int, ...], bool]] = []
    for seq_id in order:
        at, want = places[seq_id], rig.random.random() < 1 / 3 or len(entries) == len(order) - 1
        entries.append((texts[seq_id][at], (seq_id,), want))
        wanted += [(seq_id, at)] if want else []
        places[seq_id] += 1
    half = len(entries) // 2

    def evaluated(**fields: Any) -> Any:
        context = rig.context(n_seq_max=n_seq, n_ctx=n_seq * rig.n_ctx, n_batch=128, **fields)
        rows = iter(wanted)
        for part in (entries[:half], entries[half:]):
            context.decode_batch(part)
            for i in range(sum(want for *_, want in part)):
                seq_id, at = next(rows)
                what = f"row {i}: token {at} of {seq_id}, {fields}"
                rig.near(context.logits(i), expected[seq_id][at], what)
        return context

    context = evaluated()
    with contextlib.suppress(UnsupportedFeatureError):
        evaluated(n_ubatch=half - 1)  # the last step has one entry
    for k in range(n_more):
        for seq_id in rig.random.sample(range(n_seq), n_seq):
            at = places[seq_id] + k
            context.decode_one(texts[seq_id][at], seq_id=seq_id)
            rig.near(context.logits(), expected[seq_id][at], f"token {at} of {seq_id}, alone")


@law("DEC-25", since="1.2")
def check_far_tokens_count(rig: Rig) -> None:
    """A different token 100 and 200 places back changes the logits: the whole past counts."""
    info = rig.model.info
    if info.is_recurrent or info.sliding_window:
        rig.leave("this model forgets what lies far back")
    tokens = rig.story_at(rig.random.randrange(1000), min(rig.n_ctx, 220))
    row = rig.cold(tokens)
    for back in [back for back in (100, 200) if back < len(tokens)]:
        other = list(tokens)
        other[-back] = next(t for t in tokens if t != tokens[-back])
        that(not np.array_equal(rig.cold(other), row), f"the token {back} back does not count")


@law("DEC-26", since="1.2")
def check_golden_texts(rig: Rig) -> None:
    """Every row of every golden text is what the other implementation computed."""
    golden = rig.golden_texts()
    if not golden:
        rig.leave("the rig has no golden texts")
    for i, text in enumerate(golden):
        context = rig.context(n_ctx=max(rig.n_ctx, len(text.tokens)))
        if context.capabilities.logits_all:
            context.decode(text.tokens, logits="all")
            rig.near(context.logits_all(), text.logits, f"each row of golden text {i}")
        else:
            context.decode(text.tokens)
            rig.near(context.logits(), text.logits[-1], f"the last row of golden text {i}")


@law("DEC-27", since="1.2")
def check_rows_in_place_of_tokens(rig: Rig) -> None:
    """Rows of the table in place of tokens give what the tokens give; or they are refused."""
    oracle = rig.need_oracle()
    context = rig.context(n_batch=16, n_ubatch=7)
    tokens = rig.tokens(30)
    expected = oracle.rows(tokens)
    context.decode(tokens[:4])
    with contextlib.suppress(UnsupportedFeatureError):
        rows = oracle.looked_up(tokens[4:19])
        given = rows.copy()
        context.decode_spans([(0, given, "all")])
        rig.same_bits(given, rows, "the rows that were given, afterwards")
        for i in range(15):
            rig.near(context.logits(i), expected[4 + i], f"the row of token {4 + i}, given as rows")
        context.decode(tokens[19:24])
        rig.near(context.logits(), expected[23], "tokens behind rows")
        context.decode_spans([(0, oracle.looked_up(tokens[24:29]), "none")])
        context.decode_one(tokens[29])
        rig.near(context.logits(), expected[29], "a token behind rows without logits")
        _check_rows_and_changes(rig, oracle)
        _check_rows_and_an_abort(rig, oracle)
        if context.capabilities.multi_sequence:
            _check_rows_of_two(rig, oracle)


def _check_rows_and_changes(rig: Rig, oracle: Oracle) -> None:
    """A context that took rows takes tokens and rows after its threads changed, too."""
    context, tokens = rig.context(), rig.tokens(12)
    expected = oracle.rows(tokens)
    context.decode_spans([(0, oracle.looked_up(tokens[:4]), "none")])
    with contextlib.suppress(UnsupportedFeatureError):
        context.set_threads(1, 1)
    context.decode(tokens[4:8])
    rig.near(context.logits(), expected[7], "tokens behind rows and other threads")
    context.decode_spans([(0, oracle.looked_up(tokens[8:]), "last")])
    rig.near(context.logits(), expected[11], "rows behind other threads")


def _check_rows_and_an_abort(rig: Rig, oracle: Oracle) -> None:
    """Tokens are right behind rows of which not all were evaluated."""
    tokens, context = rig.tokens(24), rig.context(n_batch=32, n_ubatch=8)
    if not context.capabilities.abort:
        return
    for n_asked in (0, 1, 2):
        context.set_abort_callback(AfterCalls(n_asked))
        spans = [(0, oracle.looked_up(tokens), "last")]
        if n_asked:  # so many questions may be more than are asked
            with contextlib.suppress(DecodeAbortedError):
                context.decode_spans(spans)
        else:
            decode = partial(context.decode_spans, spans)
            raises(DecodeAbortedError, decode, "rows, told to stop at once")
        context.set_abort_callback(None)
        context.clear()
        for n in (5, 12):
            context.eval(tokens[:n], 0)
            rig.near(context.logits(), oracle.rows(tokens[:n])[-1], f"{n} tokens behind an abort")


def _check_rows_of_two(rig: Rig, oracle: Oracle) -> None:
    texts = [rig.tokens(n) for n in (17, 9)]
    expected = [oracle.rows(text) for text in texts]
    context = rig.two(n_batch=32, n_ubatch=32)
    for seq_id, text in enumerate(texts):
        context.decode(text[:3], seq_id=seq_id)
    spans = [(i, oracle.looked_up(texts[i][3:]), mode) for i, mode in ((1, "last"), (0, "all"))]
    context.decode_spans(spans)
    rows = [(1, 8), *((0, at) for at in range(3, 17))]
    for i, (seq_id, at) in enumerate(rows):
        rig.near(context.logits(i), expected[seq_id][at], f"row {i}: rows for {at} of {seq_id}")


@law("KV-24", since="1.2")
def check_programs_of_one_sequence(rig: Rig) -> None:
    """Decoding, removing and moving in any order gives the oracle's logits after each step."""
    _programs(rig, DECODES + MOVES, 10)


@law("KV-25", needs="multi_sequence", since="1.2")
def check_programs_of_several_sequences(rig: Rig) -> None:
    """Sequences decoded, copied, cut and moved in any order each give the oracle's logits."""
    for n_seq_max in (2, 3, 4):
        _programs(rig, DECODES + MOVES + SEVERAL, 3, n_seq_max=n_seq_max)


@law("KV-26", since="1.2")
def check_programs_of_long_texts(rig: Rig) -> None:
    """What is done to hundreds of tokens at once is done to each of them."""
    many = rig.context().capabilities.multi_sequence
    phrases = "append append cut cut again copy copy through_bytes"
    sizes = {"n_ctx": 2 * rig.n_ctx, "longest": rig.n_ctx, "n_seq_max": 2 if many else 1}
    _programs(rig, phrases, 8, n_steps=12, **sizes)


@law("KV-27", needs="kv_shift", since="1.2")
def check_only_distances_count(rig: Rig) -> None:
    """Where positions can be moved, logits follow the distance between tokens and nothing else.

    A move beyond the window, or beyond what the model was trained on, may be refused. This needs
    no oracle: one token's keys depend on no other.
    """
    rig.need_all_logits()
    a, b = rig.tokens(2)
    expected = rig.cold([a, b])
    for delta in (1, 20, 131, 2051, 3001):  # and odd ones that half precision does not hold
        context = rig.context()
        context.decode([a])
        try:
            context.seq_shift(0, 0, -1, delta)
            context.decode([b])
        except (InvalidInputError, UnsupportedFeatureError):
            last = min(context.n_ctx, rig.model.info.n_ctx_train or context.n_ctx) - 2
            that(delta > last, f"to move a token by {delta} is refused")
            break
        rig.near(context.logits(), expected, f"one token moved by {delta}, and the next")
    tokens = rig.tokens(40)
    rows = []
    for far in (0, 40):
        context = rig.context()
        context.decode(tokens)
        context.seq_shift(0, 20, -1, far)
        context.decode_one(a)
        rows.append(context.logits().copy())
        context.clear()
        context.decode(tokens)
        context.seq_shift(0, 0, -1, far)
        context.decode_one(a)
        rig.near(context.logits(), rig.cold([*tokens, a]), f"all moved by {far}")
    gap = float(np.abs(rows[0] - rows[1]).max())
    that(gap > rig.tolerance, f"a half moved away changes the logits by {gap:.3g} only")


@law("STATE-24", needs="sequence_state", since="1.2")
def check_programs_with_saved_state(rig: Rig) -> None:
    """What was cut, moved or copied is saved and restored as is, and every sequence continues."""
    many = rig.context().capabilities.multi_sequence
    for n_seq_max in (1, 2, 3):
        phrases = "append cut hole shift copy " + SAVES
        _programs(rig, phrases, 4, n_seq_max=n_seq_max if many else 1)


@law("LORA-9", needs="lora", since="1.2")
def check_programs_with_adapters(rig: Rig) -> None:
    """Adapters set, changed and removed between calls count in every split of what follows."""
    rig.adapters_at(1.0)
    _programs(rig, DECODES + "cut switch switch", 4)
