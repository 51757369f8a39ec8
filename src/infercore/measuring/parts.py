"""What a model does on this machine, measured through the public interface alone."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import attrs

import infercore
from infercore.measuring.machine import resident_bytes
from infercore.measuring.stats import Spread, spread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


TEXT = "the sun and a hare can see no end to it all so the old man had to run on"
N_START = 64
N_PREFILL = 512
N_FORKED = 2000
N_TOUCHED = 600
N_SPARE = 32
MIB = 2**20


@attrs.frozen(kw_only=True)
class Settings:
    """What is measured, and how often; sizes in tokens."""

    prefix_tokens: tuple[int, ...] = (128, 512, 2048)
    suffix_tokens: int = 32
    decode_tokens: int = 64
    repeats: int = 3


@attrs.frozen(kw_only=True)
class Figure:
    """One line of the result: what was measured, its value, and what it was measured on."""

    part: str
    name: str
    unit: str
    value: Spread
    note: str = ""


@attrs.frozen(kw_only=True)
class FirstToken:
    """The time to the first token of a turn, and the tokens it found and evaluated."""

    ms: float
    reused: int
    evaluated: int


class LeftOut(Exception):  # noqa: N818  (no error: the part says why it has no figure)
    """A part cannot be measured here; the text says why."""


# -- what the parts are made of, shared with the scripts in benchmarks/ ----------------------------


def text_of(tokenizer: infercore.Tokenizer, n_tokens: int, start: int = 0) -> str:
    """Return a text of ``n_tokens`` tokens or a few less; another one for another ``start``."""
    words = TEXT.split(" ")
    chosen = [words[(start + i * i + i // 7) % len(words)] for i in range(n_tokens)]
    ids = tokenizer.encode(" ".join(chosen), add_special=False)[:n_tokens]
    return tokenizer.decode(ids)


def ids_of(tokenizer: infercore.Tokenizer, n_tokens: int, start: int = 0) -> list[int]:
    """Return the ids of such a text, of exactly ``n_tokens`` tokens with what stands before it."""
    ids = tokenizer.encode(text_of(tokenizer, n_tokens, start))
    while len(ids) < n_tokens:
        more = tokenizer.encode(text_of(tokenizer, n_tokens, start + len(ids)), add_special=False)
        ids += more
    return ids[:n_tokens]


def prefill_s(context: infercore.Context, ids: Sequence[int]) -> float:
    """Return the seconds that ``ids`` take in an empty context."""
    context.clear()
    begun = perf_counter()
    evaluate(context, ids)
    context.synchronize()
    return perf_counter() - begun


def evaluate(context: infercore.Context, ids: Sequence[int]) -> None:
    """Put ``ids`` through the model, by its encoder where it has one."""
    if context.capabilities.encoder:
        context.encode(ids[: context.n_ubatch])
    else:
        context.decode(ids)


def decode_s(
    context: infercore.Context, sampler: infercore.Sampler, ids: Sequence[int], n_tokens: int
) -> tuple[list[int], float]:
    """Return ``n_tokens`` greedy tokens after ``ids``, one call each, and the seconds they took."""
    context.clear()
    context.decode(ids)
    return steps_s(context, sampler, n_tokens)


def steps_s(
    context: infercore.Context, sampler: infercore.Sampler, n_tokens: int
) -> tuple[list[int], float]:
    """Return ``n_tokens`` greedy tokens after what the context holds, and their seconds."""
    context.synchronize()
    context.reset_perf()
    tokens = []
    begun = perf_counter()
    for _ in range(n_tokens):
        token = sampler.sample(context)
        tokens.append(token)
        context.decode_one(token)
    context.synchronize()
    return tokens, perf_counter() - begun


def stream_s(session: infercore.Session, n_tokens: int) -> tuple[list[int], float]:
    """Return greedy tokens streamed from a prefilled session, and the seconds after the first.

    The time is the stream's own, from the first token chosen to the last: ``n_tokens`` steps. The
    step that makes the last one resident comes after it.
    """
    chunks = list(session.decode(max_tokens=n_tokens + 1, temperature=0, ignore_eos=True))
    usage = chunks[-1].usage
    rate = usage.tokens_per_second if usage else None
    if rate is None:
        raise infercore.InvalidInputError(
            f"{n_tokens} tokens are too few to time", field="n_tokens", value=n_tokens
        )
    return [token for chunk in chunks for token in chunk.tokens], n_tokens / rate


def first_token(session: infercore.Session, prefix: str, suffix: str) -> FirstToken:
    """Return how long a turn of ``prefix`` and ``suffix`` takes to its first token."""
    begun = perf_counter()
    first = session.ensure_prefix(prefix)
    second = session.prefill_suffix(suffix)
    stream = session.decode(max_tokens=1, temperature=0, ignore_eos=True)
    next(stream)
    ms = (perf_counter() - begun) * 1e3
    stream.close()  # type: ignore[attr-defined]
    return FirstToken(
        ms=ms,
        reused=first.reused_tokens + second.reused_tokens,
        evaluated=first.prefilled_tokens + second.prefilled_tokens,
    )


def fork_ms(session: infercore.Session) -> float:
    """Return the milliseconds that a fork takes; the fork is closed after that."""
    begun = perf_counter()
    twin = session.fork()
    took = (perf_counter() - begun) * 1e3
    twin.close()
    return took


def ms(work: Callable[[], object]) -> float:
    """Return the milliseconds of ``work``; what it returns is let go after that."""
    begun = perf_counter()
    kept = work()
    took = (perf_counter() - begun) * 1e3
    del kept
    return took


# -- the parts -------------------------------------------------------------------------------------


class Bench:
    """Measures one loaded model.

    ``context`` holds the fields of the contexts it opens; ``held_before`` are the bytes that this
    process held before the model was loaded. ``left_out`` says what could not be measured, and
    why.
    """

    def __init__(
        self,
        model: infercore.Model,
        settings: Settings,
        *,
        held_before: int,
        context: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.settings = settings
        self.held_before = held_before
        self.left_out: dict[str, str] = {}
        given = dict(context or {})
        asked = given.pop("n_ctx", None)
        if asked == "fit":
            asked = model.plan_memory(n_ctx="fit", **given).n_ctx
        self.n_ctx: int = self._window() if asked is None else asked or model.info.n_ctx_train
        self._given = given

    def _window(self) -> int:
        """Room for everything that is measured, as far as the model was trained for it."""
        s = self.settings
        longest = max(*s.prefix_tokens, N_PREFILL, N_FORKED)
        needed = longest + s.suffix_tokens + s.decode_tokens + N_SPARE
        return min(needed, self.model.info.n_ctx_train)

    def run(self, part: str) -> list[Figure]:
        """Return the figures of ``part``; those that the model cannot give are `left_out`.

        Raises what the calls raise.
        """
        figures = []
        try:
            for figure in PARTS[part](self):
                figures.append(attrs.evolve(figure, part=part))  # noqa: PERF401  (kept if it ends)
        except (LeftOut, infercore.UnsupportedFeatureError) as reason:
            self.left_out[part] = str(reason)
        return figures

    def fields(self, **more: Any) -> dict[str, Any]:
        """Return the fields of a context: what was given, the window, and ``more``."""
        return {**self._given, "n_ctx": self.n_ctx, **more}

    def room(self, wanted: int, beside: int) -> int:
        """The most of ``wanted`` tokens that the window takes beside others."""
        n = min(wanted, self.n_ctx - beside)
        if n < 1:
            raise LeftOut(f"a window of {self.n_ctx} tokens is too small; give --n-ctx")
        return n

    def repeated(self, work: Callable[[int], float]) -> Spread:
        """Call ``work`` once for nothing, then as often as the settings say."""
        work(0)
        return spread([work(i + 1) for i in range(self.settings.repeats)])


def _prefill(bench: Bench) -> Iterable[Figure]:
    n = bench.room(N_PREFILL, 0)
    ids = ids_of(bench.model.tokenizer, n)
    with bench.model.new_context(**bench.fields()) as context:
        speed = bench.repeated(lambda _: n / prefill_s(context, ids))
    yield _figure(f"{n} tokens at once", "tokens/s", speed)


def _decode(bench: Bench) -> Iterable[Figure]:
    n = bench.room(bench.settings.decode_tokens, N_START + 1)
    tokenizer, fields = bench.model.tokenizer, bench.fields()
    ids, text = ids_of(tokenizer, N_START), text_of(tokenizer, N_START)
    sampler, note = bench.model.new_sampler(temperature=0), f"{n} tokens after {N_START}, greedy"
    with (  # a session first: there is none on a model that makes no text
        bench.model.new_session(**fields) as session,
        bench.model.new_context(**fields) as context,
    ):
        speed = bench.repeated(lambda _: n / decode_s(context, sampler, ids, n)[1])
        yield _figure("one token a call", "tokens/s", speed, note)
        speed = bench.repeated(lambda _: _streamed(session, text, n)[0])
        yield _figure("streamed by a session", "tokens/s", speed, note)


def _streamed(session: infercore.Session, text: str, n: int) -> tuple[float, float]:
    """The tokens a second of a stream, and its microseconds a token outside of engine steps."""
    context: Any = getattr(session, "context", None)
    session.ensure_prefix(text)
    session.prefill_suffix(" so")
    if context is not None:
        context.reset_perf()
    seconds = stream_s(session, n)[1]
    perf = None if context is None else context.perf()
    step = perf.decode_ms / 1e3 / perf.decode_tokens if perf and perf.decode_tokens else 0.0
    return n / seconds, (seconds / n - step) * 1e6


def _layer(bench: Bench) -> Iterable[Figure]:
    """What a token costs outside of the engine's step: checks, sampling, text, stream."""
    n = bench.room(bench.settings.decode_tokens, N_START + 1)
    tokenizer, fields = bench.model.tokenizer, bench.fields()
    ids, text = ids_of(tokenizer, N_START), text_of(tokenizer, N_START)
    sampler, note = bench.model.new_sampler(temperature=0), "outside of engine steps"
    with (
        bench.model.new_session(**fields) as session,
        bench.model.new_context(**fields) as context,
    ):
        extra = bench.repeated(lambda _: _outside_us(context, sampler, ids, n))
        yield _figure("context and sampler", "us a token", extra, note)
        if getattr(session, "context", None) is None:
            raise LeftOut("this backend has sessions of its own, which do not time the engine")
        extra = bench.repeated(lambda _: _streamed(session, text, n)[1])
        yield _figure("session", "us a token", extra, note)


def _outside_us(context: Any, sampler: Any, ids: Sequence[int], n: int) -> float:
    seconds = decode_s(context, sampler, ids, n)[1]
    return float(seconds * 1e6 - context.perf().decode_ms * 1e3) / n


def _first_token(bench: Bench) -> Iterable[Figure]:
    s, tokenizer = bench.settings, bench.model.tokenizer
    beside = s.suffix_tokens + N_SPARE
    for wanted in s.prefix_tokens:
        if wanted + beside > bench.n_ctx:
            reason = f"does not fit a window of {bench.n_ctx} tokens; give --n-ctx"
            bench.left_out[f"first-token, prefix of {wanted}"] = reason
            continue
        prefix = text_of(tokenizer, wanted)
        colds, warms = [], []
        for i in range(s.repeats):
            with bench.model.new_session(**bench.fields()) as session:
                suffix = " " + text_of(tokenizer, s.suffix_tokens, 1 + 2 * i)
                colds.append(first_token(session, prefix, suffix))
                suffix = " " + text_of(tokenizer, s.suffix_tokens, 2 + 2 * i)
                warms.append(first_token(session, prefix, suffix))
        for name, turns in (("cold", colds), ("warm", warms)):
            yield _figure(
                f"{name}, prefix of {wanted}", "ms", spread([t.ms for t in turns]), _counts(turns)
            )


def _counts(turns: Sequence[FirstToken]) -> str:
    last = turns[-1]
    return f"{last.reused} reused, {last.evaluated} evaluated"


def _state(bench: Bench) -> Iterable[Figure]:
    n = bench.room(max(bench.settings.prefix_tokens), N_SPARE)
    with bench.model.new_session(**bench.fields()) as session:
        session.ensure_prefix(text_of(bench.model.tokenizer, n))
        n_held = session.explain_context().resident_tokens
        snapshot = session.snapshot()
        note = f"{n_held} tokens, {len(snapshot.data) / MIB:.1f} MiB"
        yield _figure("snapshot", "ms", bench.repeated(lambda _: ms(session.snapshot)), note)
        restored = bench.repeated(lambda _: ms(lambda: session.restore(snapshot)))
        yield _figure("restore", "ms", restored, note)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "session.kv"
            saved = bench.repeated(lambda _: ms(lambda: session.save(path)))
            yield _figure("save to a file", "ms", saved, note)
            loaded = bench.repeated(lambda _: ms(lambda: session.load(path)))
            yield _figure("load from a file", "ms", loaded, note)


def _fork(bench: Bench) -> Iterable[Figure]:
    text = text_of(bench.model.tokenizer, bench.room(N_FORKED, N_SPARE))
    try:
        free = _forked(bench, "into a free sequence", text, n_seq_max=2, kv_unified=True)
    except infercore.UnsupportedFeatureError:  # caches of their own, with windows of their own
        free = _forked(bench, "into a free sequence", text, n_seq_max=2, n_ctx=2 * bench.n_ctx)
    yield free
    yield _forked(bench, "into a new context", text)


def _forked(bench: Bench, name: str, text: str, **fields: Any) -> Figure:
    with bench.model.new_session(**bench.fields(**fields)) as session:
        session.ensure_prefix(text)
        n_held = session.explain_context().resident_tokens
        took = bench.repeated(lambda _: fork_ms(session))
    return _figure(name, "ms", took, f"{n_held} tokens")


def _memory(bench: Bench) -> Iterable[Figure]:
    """Measured before anything else ran, as freed memory does not all go back to the system."""
    plan = bench.model.plan_memory(**bench.fields())
    n = bench.room(N_TOUCHED, 1)
    with bench.model.new_context(**bench.fields()) as context:
        evaluate(context, ids_of(bench.model.tokenizer, n))
        gc.collect()
        held = resident_bytes() - bench.held_before
    note = f"n_ctx {bench.n_ctx}"
    planned = f"weights {plan.weights_bytes / MIB:.0f}, KV {plan.kv_bytes / MIB:.0f}"
    yield _figure("planned", "MiB", _one(plan.total_bytes / MIB), f"{note}; {planned}")
    yield _figure("resident", "MiB", _one(held / MIB), f"{note}; {n} tokens; engine included")
    yield _figure("resident / planned", "", _one(held / plan.total_bytes), note)


PARTS: dict[str, Callable[[Bench], Iterable[Figure]]] = {
    "memory": _memory,
    "prefill": _prefill,
    "decode": _decode,
    "layer": _layer,
    "first-token": _first_token,
    "state": _state,
    "fork": _fork,
}
"""The parts by name, in the order they are measured."""


def _figure(name: str, unit: str, value: Spread, note: str = "") -> Figure:
    return Figure(part="", name=name, unit=unit, value=value, note=note)


def _one(value: float) -> Spread:
    return spread([value])
