"""What a token costs over a hand-written ctypes loop: through a context, and streamed by a session.

Many short rounds: what else the machine does then meets both sides of a pair alike. With one
thread the engine works in the caller's, so its CPU time can be told (--cpu): it leaves out what
other processes took, which wall time does not.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import pairs
from by_hand import RawLoop

import infercore as ic
from infercore.measuring.stats import in_turns

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

TEXT = "Once upon a time there was a baker"
BY_HAND = "ctypes loop"


def through_context(
    context: ic.Context,
    sampler: ic.Sampler,
    prompt: list[int],
    n_tokens: int,
    clock: Callable[[], float],
) -> tuple[list[int], float]:
    """The greedy tokens after ``prompt`` through infercore's engine level, and their seconds."""
    context.clear()
    context.decode(prompt)
    started = clock()
    tokens = []
    for _ in range(n_tokens):
        token = sampler.sample(context)
        tokens.append(token)
        context.decode_one(token)
    return tokens, clock() - started


def through_session(
    session: ic.Session, n_tokens: int, clock: Callable[[], float]
) -> tuple[list[int], float]:
    """The same as a stream, with its text: ``n_tokens`` steps after the first token."""
    session.ensure_prefix(TEXT)
    stream = session.decode(max_tokens=n_tokens + 1, temperature=0, ignore_eos=True)
    tokens = list(next(stream).tokens)
    started = ended = clock()
    for chunk in stream:
        if chunk.tokens:  # the last step is for what comes after: it is behind the last token
            tokens += chunk.tokens
            ended = clock()
    return tokens[:n_tokens], ended - started


def measure(path: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of each contender's rounds."""
    clock = time.thread_time if options.cpu else time.perf_counter
    n, threads = options.tokens, options.threads
    fields: dict[str, Any] = {"n_ctx": n + 128, "n_threads": threads, "n_threads_batch": threads}
    gpu = {"n_gpu_layers": options.n_gpu_layers}
    flash = {} if options.n_gpu_layers else {"flash_attn": "off"}
    raw = RawLoop(path, n + 128, threads, clock=clock, **gpu)
    with (
        ic.load_model(path, backend="llamacpp", **gpu) as model,
        model.new_context(**fields, **flash) as context,
        model.new_session(**fields, **flash) as session,
    ):
        prompt = model.tokenizer.encode(TEXT)
        sampler = model.new_sampler(temperature=0)
        runs = {
            "infercore": lambda: through_context(context, sampler, prompt, n, clock),
            "infercore session": lambda: through_session(session, n, clock),
            BY_HAND: lambda: raw.run(prompt, n),
        }
        in_turns(runs, 1)
        found = in_turns(runs, options.rounds)
    if len({tuple(tokens) for taken in found.values() for tokens, _ in taken}) != 1:
        raise SystemExit("the loops chose different tokens")
    return {name: [seconds for _, seconds in taken] for name, taken in found.items()}


def rows(path: str, seconds: dict[str, list[float]], n_tokens: int) -> list[pairs.Row]:
    """What a token takes, and what each of ours takes more, round by round."""
    name, own = pairs.name_of(path), [by for by in seconds if by != BY_HAND]
    each = {by: [s / n_tokens * 1e6 for s in taken] for by, taken in seconds.items()}
    extra = {by: [a - b for a, b in zip(each[by], each[BY_HAND], strict=True)] for by in own}
    made = pairs.rows_of(each, model=name, figure="a token", unit="us", own=own)
    least = {by: f"least {min(values):.1f}" for by, values in extra.items()}
    figure = "a token, more than by hand"
    return made + pairs.rows_of(extra, model=name, figure=figure, unit="us", notes=least, own=own)


def main() -> None:
    parser = pairs.parser(__doc__, rounds=61)
    parser.add_argument("models", nargs="+", help="GGUF files")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--pairs", type=int, dest="rounds", help="the same as --rounds")
    parser.add_argument("--cpu", action="store_true", help="CPU time; for one thread")
    parser.set_defaults(threads=1)
    options = parser.parse_args()
    found = []
    for path in options.models:
        seconds = measure(path, options)
        found += rows(path, seconds, options.tokens)
        ratio = pairs.ratios(seconds["infercore"], seconds[BY_HAND]).median
        by_hand = statistics.median(seconds[BY_HAND]) / options.tokens * 1e6
        print(f"by hand {by_hand:.1f} us a token; infercore / by hand: median {ratio:.4f}")
    pairs.finish("decode_overhead", found, options)


if __name__ == "__main__":
    main()
