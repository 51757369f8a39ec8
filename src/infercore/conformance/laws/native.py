"""The engine's own sampler keeps the laws of the portable one."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.conformance.expect import equal, that
from infercore.conformance.law import law
from infercore.conformance.laws import sampling
from infercore.conformance.requirements import REQUIREMENTS
from infercore.errors import InvalidInputError, InvalidStateError, UnsupportedFeatureError

if TYPE_CHECKING:
    from infercore.conformance.rig import Rig

PORTABLE_LAWS = (
    sampling.check_temperature_zero,
    sampling.check_seed_repeats,
    sampling.check_seeds_differ,
    sampling.check_top_k,
    sampling.check_clone,
    sampling.check_reset,
    sampling.check_ignore_eos,
    sampling.check_sampling_a_row,
)


class Native:
    """A rig whose samplers are the engine's own unless a law asks for another."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rig, name)

    def sampler(self, **fields: Any) -> Any:
        """Return a sampler of the engine."""
        return self._rig.sampler(**{"implementation": "native", **fields})


@law("SAMP-22", needs="native_sampler", since="1.2")
def check_native_keeps_the_portable_laws(rig: Rig) -> None:
    """Seeds, reset, clone, ends and rows of the engine's own sampler match the portable one's."""
    native: Any = Native(rig)
    for check in PORTABLE_LAWS:
        check(native)
    if REQUIREMENTS["kv_remove"].declared(rig):
        sampling.check_no_sample_of_stale_logits(native)


LENGTHS = (100, 37, 34, 12, 3)
"""Tokens of what was said before that penalties see."""

LIFTED = (37, 12, 5)
"""Of those, how many come before the choices with each of them lifted."""

_PENALTIES: tuple[dict[str, Any], ...] = (
    {"repeat_penalty": 1.4},
    {"repeat_penalty": 1.3, "penalty_last_n": 3},
    {"repeat_penalty": 1.3, "penalty_last_n": -1},
    {"repeat_penalty": 1.3, "penalty_last_n": 0},
    {"frequency_penalty": 1.1},
    {"presence_penalty": 2.3},
    {"presence_penalty": 2.3, "frequency_penalty": 0.4, "penalty_last_n": 6},
    {"frequency_penalty": -0.7},
    {"dry_multiplier": 2.0, "dry_sequence_breakers": ()},
    {"dry_multiplier": 1.5, "dry_base": 1.3, "dry_allowed_length": 1, "dry_sequence_breakers": ()},
    {"dry_multiplier": 2.5, "dry_allowed_length": 3, "dry_sequence_breakers": ("\n",)},
    {"dry_multiplier": 2.0, "dry_penalty_last_n": 8, "dry_sequence_breakers": ()},
    {"dry_multiplier": 2.0, "dry_penalty_last_n": 0, "dry_sequence_breakers": ()},
    {"dry_multiplier": 1.2, "repeat_penalty": 1.2, "dry_sequence_breakers": ()},
    {"dry_multiplier": 3.0},
    {"dry_multiplier": 3.0, "dry_sequence_breakers": ("e", "a")},
    {"dry_multiplier": 3.0, "dry_sequence_breakers": ("e\0", "\n")},
    {"dry_multiplier": 3.0, "dry_sequence_breakers": ("the ", "\n")},
    {"dry_multiplier": 3.0, "dry_sequence_breakers": ("he",)},
    {"dry_multiplier": 3.0, "dry_sequence_breakers": ("\n", "the ")},
    {"dry_multiplier": 3.0, "dry_sequence_breakers": ("", "\n")},
    {"dry_multiplier": 2.0, "dry_base": 0.5, "dry_sequence_breakers": ()},
    {"dry_multiplier": 2.0, "dry_base": 1.0, "dry_sequence_breakers": ()},
)


@law("SAMP-23", needs="native_sampler", since="1.2")
def check_native_penalties(rig: Rig) -> None:
    """Without chance, penalties and dry choose the portable sampler's tokens, one after another.

    What was said before repeats itself in runs of several lengths, so that each penalty counts; and
    each of its tokens is lifted above all others, so that it is chosen unless it is penalised.
    """
    context, row = sampling._row(rig)  # noqa: SLF001  (the same row as in other laws)
    a, b, c, d, e = sampling._best(row, 5)  # noqa: SLF001
    other = rig.tokens(9)
    _check_long_ago(rig, context, row)
    said = [*other, a, b, c, d, *other[:4], a, b, c, e, b, a, *other, a, b, c, a, a, b]
    lifted = {
        token: float(row.max() - row[token]) + 5.0 + 0.61 * i
        for i, token in enumerate(dict.fromkeys(said))
    }
    for fields in _PENALTIES:
        for before in (*(said[:n] for n in LENGTHS), [a, b, c, a, b], [a], []):
            also = [{**fields, "logit_bias": lifted}] if len(before) in LIFTED else []
            for asked in (fields, *also):
                with contextlib.suppress(UnsupportedFeatureError):
                    _check_same_choices(rig, context, before, {"temperature": 0, **asked})
    _check_bias(rig, context, row)
    _check_breaker_across_tokens(rig, context, row)
    _check_long_breaker(rig, context, row)
    _check_amount(rig, context, row)


def _check_amount(rig: Rig, context: Any, row: Any) -> None:
    """How much dry takes from a token grows with the repetition that it would prolong."""
    *run, last = dict.fromkeys(token for token in rig.tokens(60) if token != int(row.argmax()))
    first = int(row.argmax())
    for n in (3, 6):
        for share in (0.6, 0.95, 1.05, 1.6):
            lifted = {last: float(row[first] - row[last]) + share * 1.5 * 1.3 ** (n - 2)}
            fields: dict[str, Any] = {"temperature": 0, "dry_multiplier": 1.5, "dry_base": 1.3}
            fields |= {"dry_sequence_breakers": (), "logit_bias": lifted}
            long, short = [*run[:n], last, run[8]], [*run[n - 2 : n], last, run[9]]
            for earlier in (long, [*long, *short], [*short, *long]):  # the longest counts
                with contextlib.suppress(UnsupportedFeatureError):
                    _check_same_choices(rig, context, [*earlier, *run[:n]], fields)


def _check_breaker_across_tokens(rig: Rig, context: Any, row: Any) -> None:
    """A breaker of which one token has the end and the next one the rest stops a repetition."""
    names = {i: rig.tokenizer.token_bytes(i) for i in dict.fromkeys(rig.tokens(150))}
    texts = {i: name for i, name in names.items() if name.isascii() and len(name) > 1}
    if len(texts) < 7:  # noqa: PLR2004
        return
    *run, last, other = list(texts)[:7]
    lifted = {last: float(row.max() - row[last]) + 5.0}
    dry = {"temperature": 0, "dry_multiplier": 30.0, "logit_bias": lifted}
    ends = texts[run[-2]][-1:]
    pieces = ((i, rig.tokenizer.token_bytes(i)) for i in range(min(rig.tokenizer.n_vocab, 512)))
    single = next(((i, name) for i, name in pieces if name.isalpha() and len(name) == 1), None)
    for token, name in ((run[-1], texts[run[-1]]), *([single] if single else ())):
        run[-1] = token
        whole, said = ends + name, [*run, last, other, *run]
        breaker = whole.decode()
        if any(whole in rig.tokenizer.token_bytes(each) for each in said):
            continue
        for breakers in ((), (breaker,), (breaker, "\n"), ("\n", breaker)):
            fields = {**dry, "dry_sequence_breakers": breakers}
            with contextlib.suppress(UnsupportedFeatureError):
                _check_same_choices(rig, context, said, fields)


def _check_long_breaker(rig: Rig, context: Any, row: Any) -> None:
    """A breaker of which the text has all but the end counts as for the portable sampler."""
    story = rig.story_at(0, 60)
    run, others = story[:50], [token for token in story[50:] if token not in story[:50]]
    text = rig.tokenizer.decode(run)
    if len(others) < 2 or len(text) < LONGEST or not text.isascii():  # noqa: PLR2004
        return
    last, other = others[:2]
    lifted = {last: float(row.max() - row[last]) + 5.0}
    for n in (LONGEST - 5, LONGEST - 1, LONGEST):  # of the longest the end is cut off
        breaker = f"{text[-n:]}zzzzz"
        fields = {"temperature": 0, "dry_multiplier": 30.0, "logit_bias": lifted}
        with contextlib.suppress(UnsupportedFeatureError):
            asked = {**fields, "dry_sequence_breakers": (breaker,)}
            _check_same_choices(rig, context, [*run, last, other, *run], asked)


LONGEST = 40
"""Bytes of a breaker that count."""
_LONGEST_SAID = 2**14
_BEFORE_CUTS: tuple[dict[str, Any], ...] = (
    {"repeat_penalty": 10.0},
    {"presence_penalty": 30.0, "frequency_penalty": 2.0},
    {"dry_multiplier": 30.0, "dry_allowed_length": 1, "dry_sequence_breakers": ()},
)


def _check_long_ago(rig: Rig, context: Any, row: Any) -> None:
    """A window reaches as far as it says, and penalties come before what cuts to one token."""
    best = sampling._best(row, 3)  # noqa: SLF001
    others = [token for token in rig.tokens(150) if token not in best]
    asked: list[tuple[dict[str, Any], list[int]]] = [
        ({"temperature": 0, "repeat_penalty": 10.0, "penalty_last_n": n}, [*best, *others])
        for n in (-1, len(others), len(others) + 1, len(others) + 3)
    ]
    to_one: dict[str, Any] = {"temperature": 1.0, "top_k": 1}
    asked += [({**to_one, **fields}, [*best, best[0], *best]) for fields in _BEFORE_CUTS]
    n_train = rig.model.info.n_ctx_train
    if n_train <= _LONGEST_SAID:  # -1 looks back over all tokens, more than the trained window
        long = [*best, *others * (n_train // len(others) + 2)]
        asked.append(({"temperature": 0, "repeat_penalty": 10.0, "penalty_last_n": -1}, long))
    # The likeliest token would prolong a run that stands at the beginning and at the end.
    run = others[:5]
    repeated = [*run, best[0], *others[5:40], *run]
    dry: dict[str, Any] = {"dry_multiplier": 30.0, "dry_sequence_breakers": (), "temperature": 0}
    n = len(repeated)
    asked += [({**dry, "dry_penalty_last_n": m}, repeated) for m in (-1, 8, 39, n - 5, n - 2, n)]
    for fields, said in asked:
        try:
            native = rig.sampler(**{**sampling.PLAIN, **fields}, implementation="native")
        except UnsupportedFeatureError:
            continue
        portable = rig.sampler(**{**sampling.PLAIN, **fields})
        for sampler in (portable, native):
            sampler.observe(said)
        chosen = [portable.sample(context) for _ in range(3)]
        equal([native.sample(context) for _ in range(3)], chosen, f"tokens with {fields}")


def _check_same_choices(rig: Rig, context: Any, before: list[int], fields: dict[str, Any]) -> None:
    native = rig.sampler(implementation="native", **fields)
    portable = rig.sampler(**fields)
    for sampler in (portable, native):
        sampler.observe(before)
    for i in range(8):
        # A distribution of two near ones cannot tell which is right: another draw can.
        chosen, found = portable.sample(context), native.sample(context)
        equal(found, chosen, f"token {i} after {before} with {fields}")


def _check_bias(rig: Rig, context: Any, row: Any) -> None:
    """A bias counts to its last part, and logits below zero are penalised away from zero."""
    first, *others = sampling._best(row, 5)  # noqa: SLF001
    cold: dict[str, Any] = {"temperature": 0, "implementation": "native"}
    for token in others:
        gap = float(row[first] - row[token])
        for share, chosen in ((0.98, first), (1.02, token)) if gap > rig.tolerance else ():
            sampler = rig.sampler(**cold, logit_bias={token: share * gap})
            equal(sampler.sample(context), chosen, f"the token with a bias of {share} of the gap")
    if len(row) > MOST_BIASED or row[first] - row[others[0]] > MOST_APART:
        return
    below = dict.fromkeys(range(len(row)), -float(row.max()) - 1.0)
    for implementation in ("portable", "native"):
        sampler = rig.sampler(
            **{**cold, "implementation": implementation}, logit_bias=below, repeat_penalty=10.0
        )
        sampler.observe([first])
        found = sampler.sample(context)
        that(found != first, f"{implementation}: a penalty raised a logit that is below zero")


MOST_BIASED = 2**15
MOST_APART = 8.0
"""A penalty of 10 moves a logit of -1 by 9: beyond the next one, where that is nearer."""


_CUTS: tuple[dict[str, Any], ...] = (
    {"xtc_probability": 0.4, "xtc_threshold": 0.02, "temperature": 3.0, "top_k": 12},
    {"mirostat": 1, "mirostat_tau": 1.0, "mirostat_eta": 0.3, "temperature": 2.0},
    {"mirostat": 1, "mirostat_tau": 4.0, "temperature": 3.0},
    {"mirostat": 2, "mirostat_tau": 1.0, "mirostat_eta": 0.3, "temperature": 2.0},
    {"mirostat": 2, "mirostat_tau": 4.0, "temperature": 3.0},
)
N_DRAWS = 120
MOST_NEW = 9


@law("SAMP-24", needs="native_sampler", since="1.2")
def check_native_cuts(rig: Rig) -> None:
    """Chance within filters, and mirostat over several tokens, draw as often as the portable's."""
    context, row = sampling._row(rig)  # noqa: SLF001
    warm = sampling._warm(row, 0.01)  # noqa: SLF001
    few: dict[str, Any] = {"mirostat": 1, "temperature": warm, "top_k": 8}
    for fields in (*_CUTS, *({**few, "mirostat_tau": tau} for tau in (1.6, 2.0, 2.4, 2.8))):
        asked = {**sampling.PLAIN, **fields}
        try:
            rig.sampler(**asked, implementation="native")
        except UnsupportedFeatureError:
            continue
        seen: list[Counter[Any]] = []
        for kind in ("portable", "native"):
            counts: Counter[Any] = Counter()
            for seed in range(N_DRAWS):
                sampler = rig.sampler(**asked, implementation=kind, seed=seed)
                n = 4 if fields in _CUTS and "mirostat" in fields else 1
                tokens = [int(sampler.sample(context)) for _ in range(n)]
                counts.update((i, token) for i, token in enumerate(tokens))
            seen.append(counts)
        for drawn in seen[0].keys() | seen[1].keys():
            one, two = (counts[drawn] for counts in seen)
            allowed = 5 * np.sqrt(one + two) + 2
            that(abs(one - two) <= allowed, f"{fields}: {drawn} {two} times, portable {one}")
        if "top_k" in fields:  # of few tokens, those that may come do come
            new = sum(n for drawn, n in seen[1].items() if not seen[0][drawn])
            that(new <= MOST_NEW, f"{fields}: {new} first tokens that the portable never chose")


WARM = 40.0
"""So warm that of the tokens that filters leave each comes about as often as another."""
N_MIXES, MOST_LEFT = 20, 9


@law("SAMP-27", needs="native_sampler", since="1.2")
def check_native_filters_leave_the_same(rig: Rig) -> None:
    """Filters set near their edges, alone and together, leave the tokens the portable's leave.

    Also of a row of which the likeliest tokens are so unlikely that their probability is 0.
    """
    n_left = N_MIXES
    for i in range(12 * N_MIXES):
        context, row = sampling._row(rig)  # noqa: SLF001
        kept = [(name, "keep") for name in ("p", "min", "typical", "xtc")]
        plain: dict[str, Any] = {**sampling.PLAIN, "temperature": WARM}
        if i % 3 == 1 and len(row) <= MOST_BIASED:
            lost = rig.random.sample(sampling._best(row, 6), 3)  # noqa: SLF001
            plain["logit_bias"] = dict.fromkeys(lost, rig.random.choice((-5000.0, -np.inf)))
            row = row.copy()
            row[lost] = row.min()  # for the edges: what is lost counts for nothing
        fields = {**plain, **_mix(rig, row, (kept * 3)[i : i + 1])}
        row = context.logits()
        expected = _left(rig, row, fields)
        if expected is None:
            continue
        try:
            native = rig.sampler(**fields, implementation="native", seed=rig.random.randrange(999))
        except UnsupportedFeatureError:
            continue
        found = {int(native.sample(context)) for _ in range(25 * len(expected))}
        equal(sorted(found), expected, f"tokens left by {fields}")
        n_left -= 1
        if not n_left:
            break
    _check_warmth(rig)
    _check_impossible(rig)


def _check_warmth(rig: Rig) -> None:
    """With a range of temperatures tokens come as often as the portable sampler says."""
    n = 600
    for by, exponent, top_k in (
        (2.9, 1.0, 8), (2.9, 4.0, 8), (2.9, 4.0, 8), (2.9, 0.3, 8), (5.0, 1.0, 8), (1.5, 1.0, 8),
        (1.0, 8.0, 8), (2.9, 4.0, 2), (2.9, 9.0, 2), (2.9, 1.0, 1),
    ):  # fmt: skip
        context, row = sampling._row(rig)  # noqa: SLF001
        asked = {**sampling.PLAIN, "temperature": 3.0, "dynatemp_range": by, "top_k": top_k}
        asked |= {"dynatemp_exponent": exponent, "seed": 5}
        ids, shares = rig.sampler(**asked).distribution(row.astype(np.float32))
        try:
            native = rig.sampler(**asked, implementation="native")
        except UnsupportedFeatureError:
            return
        counts = Counter(int(native.sample(context)) for _ in range(n))
        for token, share in zip(ids.tolist(), shares.tolist(), strict=True):
            allowed = 5 * np.sqrt(n * share * (1 - share)) + 2
            gap = abs(counts[token] - n * share)
            that(gap <= allowed, f"{asked}, token {token}: {counts[token]} of {n}, p={share:.3f}")


def _check_impossible(rig: Rig) -> None:
    """Tokens so unlikely that their probability is 0 are left out, and disturb no filter.

    Where one token is allowed, that one comes; where none is, there is nothing to sample.
    """
    context, row = sampling._row(rig)  # noqa: SLF001
    best = sampling._best(row, 3)  # noqa: SLF001
    bias = {token: -5000.0 for token in range(len(row)) if token not in best}
    if len(row) > MOST_BIASED:
        return
    never = {token: -np.inf for token in range(len(row)) if token != best[0]}
    unlikely = dict.fromkeys(never, -5000.0)
    everything = dict.fromkeys(range(len(row)), -np.inf)
    for fields in _FILTERS:
        asked = {**sampling.PLAIN, "temperature": 2.0, "logit_bias": bias, **fields}
        try:
            native = rig.sampler(**asked, implementation="native", seed=5)
        except UnsupportedFeatureError:
            continue
        found = {int(native.sample(context)) for _ in range(20)}
        that(found <= set(best), f"{fields}: {found}, though all but three are impossible")
        for alone in (never, unlikely):
            one = rig.sampler(**{**asked, "logit_bias": alone}, implementation="native", seed=5)
            equal(int(one.sample(context)), best[0], f"{fields}: the only token allowed")
    try:
        none = rig.sampler(temperature=1.0, logit_bias=everything, implementation="native")
        none.sample(context)
    except InvalidInputError as error:
        is_given = error.value in (-np.inf, everything)
        that(error.field == "logit_bias" and is_given, f"{error.field} of {error.value!r}")
    except InvalidStateError as error:
        equal((error.operation, bool(error.state)), ("sample", True), "operation and state")
    else:
        that(condition=False, text="a token was sampled where none is allowed")


_FILTERS: tuple[dict[str, Any], ...] = (
    {"typical_p": 0.6},
    {"dynatemp_range": 1.0},
    {"dynatemp_range": 2.0},
    {"mirostat": 1},
    {"mirostat": 2},
    {"xtc_probability": 1.0, "xtc_threshold": 0.01},
    {"top_n_sigma": 2.0},
    {"min_p": 0.01, "top_p": 0.99},
    {"typical_p": 0.5, "top_k": 1},
    {"dynatemp_range": 1.0, "top_k": 1},
    {"mirostat": 1, "top_k": 1},
    {"mirostat": 2, "top_k": 1},
    {"xtc_probability": 1.0, "top_k": 1},
)


def _mix(rig: Rig, row: Any, named: list[tuple[str, str]]) -> dict[str, Any]:
    """Return filters, each with its edge between two of the likeliest tokens.

    The first of those ``named``, or else one to four of all.
    """
    order = np.sort(row)[::-1]
    p = np.exp(order - order[0])
    p /= p.sum()
    sums = np.cumsum(p)
    after = [rig.random.randint(1, 6) for _ in range(6)]
    a, b, c, d, e, f = after
    every: dict[str, dict[str, Any]] = {
        "k": {"top_k": a},
        "p": {"top_p": float((sums[b - 1] + sums[b]) / 2)},
        "min": {"min_p": float(np.sqrt(p[c - 1] * p[c]) / p[0])},
        "sigma": {"top_n_sigma": float((order[0] - (order[d - 1] + order[d]) / 2) / row.std())},
        "typical": {"typical_p": rig.random.uniform(0.2, 0.9)},
        "xtc": {"xtc_probability": 1.0, "xtc_threshold": float(np.sqrt(p[e - 1] * p[e]))},
        "keep": {"min_keep": f},
    }
    drawn = rig.random.sample(sorted(every), rig.random.randint(1, 4))
    chosen = named[0] if named else drawn
    return {name: value for key in chosen for name, value in every[key].items()}


_EDGES = {"top_p", "min_p", "typical_p", "top_n_sigma", "xtc_threshold"}
"""An edge between two tokens that are nearly as likely is not tried."""


def _left(rig: Rig, row: Any, fields: dict[str, Any]) -> list[int] | None:
    """Return what the portable sampler's filters leave; None for much, or at the very edge."""

    def ids(**other: Any) -> list[int]:
        found, _ = rig.sampler(**{**fields, **other}).distribution(row.astype(np.float32))
        return sorted(found.tolist())

    expected = ids()
    if len(expected) > MOST_LEFT:
        return None
    for name, value in fields.items():
        if name in _EDGES and 0 < value != 1:
            near = (ids(**{name: value * by}) for by in (0.998, min(1.002, 1 / min(value, 1))))
            if any(found != expected for found in near):
                return None
    return expected


_STATES: tuple[dict[str, Any], ...] = (
    {"mirostat": 1, "mirostat_tau": 3.0, "mirostat_eta": 0.4, "temperature": 3.0},
    {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.4, "temperature": 3.0},
    {"repeat_penalty": 1.5, "frequency_penalty": 0.3, "temperature": 3.0},
    {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_sequence_breakers": ()},
)


@law("SAMP-25", needs="native_sampler", since="1.2")
def check_native_state_is_cloned_and_reset(rig: Rig) -> None:
    """What the engine's own sampler remembers passes to its clone and is cleared by a reset."""
    context, row = sampling._row(rig)  # noqa: SLF001
    said = sampling._best(row, 3)  # noqa: SLF001
    for fields in _STATES:
        sampler = rig.sampler(
            **{**sampling.PLAIN, **fields}, implementation="native", seed=rig.random.randrange(999)
        )
        sampler.observe(said)
        first = [sampler.sample(context) for _ in range(6)]
        twin = rig.opened(sampler.clone())
        after = [twin.sample(context) for _ in range(8)]
        equal([sampler.sample(context) for _ in range(8)], after, f"beside its clone, {fields}")
        sampler.reset()
        sampler.observe(said)
        equal([sampler.sample(context) for _ in range(6)], first, f"after a reset, {fields}")
        more = [twin.sample(context) for _ in range(4)]
        fresh = rig.opened(twin.clone())
        that(len(more) == 4 and fresh.seed == sampler.seed, "the seed of a clone")  # noqa: PLR2004
