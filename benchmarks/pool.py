"""Sessions of a pool, against one session, by-hand batches and themselves without a pool.

    python benchmarks/pool.py PART MODEL [--json benchmarks/results/pool-PART.json]

Parts: ``together`` (N sessions at once over one alone, over batches and turns by hand, and over
`ContinuousBatchingPipeline` for an IR), ``few`` ("auto" over taking turns), ``resident`` (the first
token of a second session on a prefix that another holds), ``moved`` (lost cells brought back),
``gap`` (what a long prompt does to those that generate), ``python`` (CPU time outside of the
engine), ``books`` (removals and counts among interleaved tokens). Each prints its goals, met or
missed. What is compared with other processes is in ``pool_rivals.py``.
"""

from __future__ import annotations

import os
import statistics
import time
from time import perf_counter
from typing import TYPE_CHECKING, Any

import goals
import pairs
import pooled
import rivals
from goals import ALONE, BETTER, OWNER, PIPELINE, POOL

import infercore as ic
from infercore.measuring import parts
from infercore.measuring.stats import in_turns, spread

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from typing_extensions import Self

BATCHED, TURNS = "batched by hand", "in turns by hand"


def together(path: str, options: argparse.Namespace) -> list[pairs.Row]:
    """N sessions at once, beside one alone and what one would do by hand."""
    n, width, threads = options.tokens, options.sessions, options.threads
    n_ctx = pooled.N_BEFORE + 2 * n + 64
    with (
        ic.load_model(path) as model,
        model.new_pool(n_ctx=n_ctx, n_parallel=width, n_threads=threads) as pool,
        model.new_session(n_ctx=n_ctx, n_threads=threads) as session,
        model.new_context(n_ctx=n_ctx * width, n_seq_max=width, n_threads=threads) as context,
    ):
        crowd = pooled.Crowd(pool, width)
        ids = [model.tokenizer.encode(text) for text in crowd.texts]
        runs: dict[str, Callable[[], float]] = {
            POOL: lambda: crowd.rate(n),
            ALONE: lambda: pooled.alone(session, crowd.texts[0], n),
            BATCHED: lambda: pooled.batched(context, ids, n),
        }
        if not os.path.isdir(path):
            runs[TURNS] = lambda: pooled.in_turns(context, ids, n // 2)
        if os.path.isdir(path):
            batching = rivals.Batching(path, n_threads=threads)
            runs[PIPELINE] = lambda: batching.rate(ids, n)
        apart = {name: pooled.in_own_thread(run) for name, run in runs.items()}
        in_turns(apart, 1)
        found = in_turns(apart, options.rounds)
        crowd.close()
    if TURNS in found:
        both = zip(found[BATCHED], found[TURNS], strict=True)
        found[BETTER] = [max(pair) for pair in both]
    figure = f"{width} sessions, {n} tokens each"
    return pairs.rows_of(found, model=pairs.name_of(path), figure=figure, unit="tokens/s")


def few(path: str, options: argparse.Namespace) -> list[pairs.Row]:
    """2 to 6 sessions with "auto", beside taking turns."""
    n, threads, found = options.tokens, options.threads, []
    fields: dict[str, Any] = {"n_ctx": pooled.N_BEFORE + 2 * n + 64, "n_threads": threads}
    with ic.load_model(path) as model:
        for width in options.widths:
            with (
                model.new_pool(n_parallel=width, batching="auto", **fields) as auto,
                model.new_pool(n_parallel=width, batching="never", **fields) as never,
            ):
                crowds = {"auto": pooled.Crowd(auto, width), "turns": pooled.Crowd(never, width)}
                runs = {name: lambda c=crowd: c.rate(n) for name, crowd in crowds.items()}
                found += pairs.compare(
                    runs,
                    model=pairs.name_of(path),
                    figure=f"{width} sessions, {n} tokens each",
                    unit="tokens/s",
                    rounds=options.rounds,
                )
                for crowd in crowds.values():
                    crowd.close()
    return found


def first_token_s(pool: ic.SessionPool, text: str, namespace: str) -> float:
    """Return the seconds to a new session's first token after ``text``."""
    with pool.open_session(namespace=namespace) as session:
        begun = perf_counter()
        session.ensure_prefix(text)
        next(session.decode(max_tokens=1, temperature=0, ignore_eos=True))
        return perf_counter() - begun


def resident(path: str, options: argparse.Namespace) -> list[pairs.Row]:
    """A second session's first token on a prefix that another holds, beside a cold one's."""
    n = options.prefix
    fields = {"n_ctx": n + 256, "n_cells": 2 * n + 512, "n_parallel": 2}
    with (
        ic.load_model(path) as model,
        model.new_pool(n_threads=options.threads, **fields) as pool,
        pool.open_session(namespace="shared") as holder,
    ):
        text = parts.text_of(model.tokenizer, n)
        holder.ensure_prefix(text)
        names = iter(range(10**6))
        runs = {
            "resident": lambda: first_token_s(pool, text, "shared"),
            "cold": lambda: first_token_s(pool, text, f"cold {next(names)}"),
        }
        return pairs.compare(
            runs,
            model=pairs.name_of(path),
            figure=f"first token after a prefix of {n}",
            unit="s",
            rounds=options.rounds,
        )


def moved(path: str, options: argparse.Namespace) -> list[pairs.Row]:
    """A session that lost its cells to another goes on, from host memory or evaluated anew."""
    n = options.prefix
    fields = {"n_ctx": n + 256, "n_cells": n + 320, "n_parallel": 2, "n_threads": options.threads}
    with (
        ic.load_model(path) as model,
        model.new_pool(cache_bytes=2**31, **fields) as keeping,
        model.new_pool(**fields) as plain,
    ):
        text = parts.text_of(model.tokenizer, n)
        sessions = [keeping.open_session(namespace=str(i)) for i in range(2)]
        others = [plain.open_session(namespace=str(i)) for i in range(2)]
        for session in (*sessions, *others):
            session.ensure_prefix(text)
        turn = iter(range(10**6))

        def back(both: list[Any]) -> float:
            session = both[next(turn) // 2 % 2]  # the other one has the cells
            begun = perf_counter()
            session.prefill_suffix(" now")
            return perf_counter() - begun

        runs = {
            "moved out and back": lambda: back(sessions),
            "evaluated again": lambda: back(others),
        }
        in_turns(runs, 1)
        found: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(options.rounds):
            for name, run in runs.items():
                found[name].append(run())
        figure = f"going on after {n} tokens whose cells were lost"
        return pairs.rows_of(found, model=pairs.name_of(path), figure=figure, unit="s")


def gap(path: str, options: argparse.Namespace) -> list[pairs.Row]:
    """The gaps between tokens of sessions that generate, while a long prompt arrives."""
    n, made = options.prefix, []
    with ic.load_model(path) as model:
        for width in options.widths:
            with model.new_pool(
                n_ctx=n + 256,
                n_cells=2 * n + 1024 + width * 1024,
                n_parallel=width + 1,
                n_threads=options.threads,
            ) as pool:
                values = gaps(pool, width, parts.text_of(model.tokenizer, n), options)
            figure = f"{width} running, a prompt of {n} arrives"
            made += [
                pairs.Row(
                    model=pairs.name_of(path),
                    figure=figure,
                    by=by,
                    unit="" if "/" in by else "s",
                    value=spread(found),
                )
                for by, found in values.items()
            ]
    return made


def gaps(
    pool: ic.SessionPool, width: int, text: str, options: argparse.Namespace
) -> dict[str, list[float]]:
    """Let ``text`` arrive beside ``width`` that generate, and alone, in turns."""
    bias = rivals.steady_bias(pool.tokenizer)
    names = iter(range(10**6))

    def cold() -> float:
        return first_token_s(pool, text, f"cold {next(names)}")

    alone, first, quiet, busy = [], [], [], []
    for turn in range(-1, options.rounds):
        if turn == 0:  # the round before meets every length of a call for the first time
            del alone[:], first[:], quiet[:], busy[:]
        crowd = pooled.Background(pool, width, bias)
        time.sleep(options.before)
        quiet += crowd.gaps(lambda: time.sleep(options.before))
        busy.append(crowd.gaps(lambda: first.append(cold())))
        crowd.stop()
        alone.append(cold())
    usual = statistics.median(quiet)
    busy = [gaps or [usual] for gaps in busy]  # a short prompt is read between two tokens
    return {
        "p99 gap / median gap before": [quantile([x for g in busy for x in g], 0.99) / usual],
        "median gap / median gap before": [statistics.median(g) / usual for g in busy],
        "longest gap / median gap before": [max(g) / usual for g in busy],
        "its first token / alone": [f / statistics.median(alone) for f in first],
        "gap before": quiet,
        "first token": first,
        "first token, alone": alone,
    }


def quantile(values: list[float], share: float) -> float:
    """Return the value below which ``share`` of ``values`` lie."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


class EngineClock:
    """CPU seconds within ``llama_decode``, which with one thread works in its caller's."""

    def __init__(self) -> None:
        from infercore_llamacpp import decoding  # noqa: PLC0415  (needs the plugin)

        self._module: Any = decoding
        self._own = self._module._decode  # noqa: SLF001  (what contexts opened from now on call)
        self.seconds, self.n_calls = 0.0, 0

    def __enter__(self) -> Self:
        self._module._decode = self._decode  # noqa: SLF001
        return self

    def __exit__(self, *_: object) -> None:
        self._module._decode = self._own  # noqa: SLF001

    def _decode(self, *arguments: Any) -> int:
        begun = time.thread_time()
        code: int = self._own(*arguments)
        self.seconds += time.thread_time() - begun
        self.n_calls += 1
        return code


def python(path: str, options: argparse.Namespace) -> list[pairs.Row]:
    """CPU time outside of the engine, a generated token and a token of a prompt."""
    n, width = options.tokens, options.sessions
    figures: dict[tuple[str, str], list[float]] = {}
    with (
        EngineClock() as engine,
        ic.load_model(path, backend="llamacpp") as model,
        model.new_pool(n_ctx=2048, n_parallel=width, n_threads=1, batching="always") as pool,
    ):
        crowd = pooled.Crowd(pool, width)
        crowd.run(n)
        owner = pool_clock(pool)

        def outside(figure: str, n_tokens: int, work: Callable[[], object]) -> None:
            whole, own, inside = time.process_time(), owner(), engine.seconds
            work()
            spent = engine.seconds - inside
            all_threads = time.process_time() - whole - spent
            in_owner = owner() - own - spent
            for by, seconds in ((OWNER, in_owner), ("all threads", all_threads)):
                figures.setdefault((figure, by), []).append(seconds / n_tokens * 1e6)

        words = pool.tokenizer.encode(crowd.texts[0], add_special=False)
        long = words * (1024 // len(words))
        generated = f"a generated token, {width} sessions"
        for turn in range(options.rounds):
            outside(generated, n * width, lambda: crowd.run(n))
            outside("a prompt token", len(long), lambda t=turn: prefill(pool, long, t))
        crowd.close()
    return [
        pairs.Row(model=pairs.name_of(path), figure=figure, by=by, unit="us", value=spread(values))
        for (figure, by), values in figures.items()
    ]


def prefill(pool: ic.SessionPool, ids: list[int], turn: int) -> None:
    """Let a session of its own namespace evaluate ``ids``, which are tokenized before."""
    with pool.open_session(namespace=f"prompt {turn}") as session:
        session.resident.context.decode(ids)


def pool_clock(pool: ic.SessionPool) -> Callable[[], float]:
    """Return a clock of the CPU seconds of the thread that owns the pool's context."""
    return lambda: pool.owner.ask(time.thread_time)


def books(path: str, options: argparse.Namespace) -> list[pairs.Row]:
    """What changes and counts cost where the tokens of many sequences lie between each other."""
    n, width = options.each, options.sessions
    made: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        begun = perf_counter()
        work()
        made.setdefault(name, []).append((perf_counter() - begun) * 1e3)

    with (
        ic.load_model(path) as model,
        model.new_context(n_ctx=(n + 64) * (width + 2), n_seq_max=width + 2, kv_unified=True) as c,
    ):
        for i in range(n):
            c.decode_spans([(s, [5 + (s + i) % 50], "none") for s in range(width)])
        for turn in range(options.rounds):
            s = turn % width
            timed("n_free", c.n_free)
            timed("n_free(keep=)", lambda s=s: c.n_free(s, keep=n // 2))
            timed("seq_copy", lambda s=s: c.seq_copy(s, width))
            timed("seq_copy, a part", lambda s=s: c.seq_copy(s, width + 1, 0, n // 2))
            timed("seq_remove, a copy", lambda: c.seq_remove(width))
            timed("seq_remove, a copy of a part", lambda: c.seq_remove(width + 1))
            timed("seq_remove, the last", lambda s=s: c.seq_remove(s, c.n_past(s) - 1, -1))
        for s in range(width // 2):
            timed("seq_remove, a whole sequence", lambda s=s: c.seq_remove(s))
        timed("seq_keep", lambda: c.seq_keep(width - 1))
    made["the slowest"] = [max(statistics.median(values) for values in made.values())]
    return [
        pairs.Row(
            model=pairs.name_of(path),
            figure=f"{width} x {n} tokens between each other",
            by=by,
            unit="ms",
            value=spread(values),
        )
        for by, values in made.items()
    ]


PARTS: dict[str, Callable[[str, argparse.Namespace], list[pairs.Row]]] = {
    "together": together,
    "few": few,
    "resident": resident,
    "moved": moved,
    "gap": gap,
    "python": python,
    "books": books,
}


def main() -> None:
    parser = pairs.parser(__doc__, rounds=5)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("models", nargs="+", help="GGUF files and OpenVINO folders")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--widths", type=int, nargs="+", default=None, help="of few and gap")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prefix", type=int, default=2048)
    parser.add_argument("--each", type=int, default=8000, help="tokens a sequence, of books")
    parser.add_argument("--before", type=float, default=2.0, help="seconds without a prompt")
    options = parser.parse_args()
    options.widths = options.widths or ([1, 8] if options.part == "gap" else [2, 3, 4, 6])
    rows = [row for path in options.models for row in PARTS[options.part](path, options)]
    pairs.finish("pool", rows, options)
    goals.tell(f"pool-{options.part}", rows)


if __name__ == "__main__":
    main()
