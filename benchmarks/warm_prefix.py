"""Time to first token, warm against cold, in paired runs on each model that is named."""

from __future__ import annotations

import argparse
import statistics
import time

import infercore as ic

TEXT = "the sun and a hare can see no end to it all so the old man had to run on"
WORDS = TEXT.split(" ")


def text_of(tokenizer: ic.Tokenizer, n_tokens: int, start: int) -> str:
    """Return text of about ``n_tokens`` tokens."""
    words = [WORDS[(start + i * i) % len(WORDS)] for i in range(n_tokens)]
    ids = tokenizer.encode(" ".join(words), add_special=False)[:n_tokens]
    return tokenizer.decode(ids)


def first_token_ms(session: ic.Session, prefix: str, suffix: str) -> tuple[float, int, int]:
    """Return the milliseconds to the first token, and the tokens reused and evaluated."""
    started = time.perf_counter()
    first = session.ensure_prefix(prefix)
    second = session.prefill_suffix(suffix)
    stream = session.decode(max_tokens=1, temperature=0, ignore_eos=True)
    next(stream)
    elapsed = (time.perf_counter() - started) * 1e3
    stream.close()  # type: ignore[attr-defined]
    reused = first.reused_tokens + second.reused_tokens
    return elapsed, reused, first.prefilled_tokens + second.prefilled_tokens


def measure(path: str, n_prefix: int, n_suffix: int, n_pairs: int) -> None:
    with ic.load_model(path) as model:
        prefix = text_of(model.tokenizer, n_prefix, 0)
        colds, warms = [], []
        for pair in range(n_pairs):
            with model.new_session(n_ctx=n_prefix + n_suffix + 64) as session:
                cold = first_token_ms(session, prefix, " " + text_of(model.tokenizer, n_suffix, 1))
                suffix = " " + text_of(model.tokenizer, n_suffix, 3 + pair)
                warm = first_token_ms(session, prefix, suffix)
            colds.append(cold[0])
            warms.append(warm[0])
            print(
                f"  cold {cold[0]:8.0f} ms ({cold[2]} evaluated)   "
                f"warm {warm[0]:7.0f} ms ({warm[1]} reused, {warm[2]} evaluated)   "
                f"ratio {warm[0] / cold[0]:.4f}"
            )
        ratios = [w / c for w, c in zip(warms, colds, strict=True)]
        print(
            f"{model.backend}: median cold {statistics.median(colds):.0f} ms, "
            f"warm {statistics.median(warms):.0f} ms, warm / cold {statistics.median(ratios):.4f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--prefix", type=int, default=2048)
    parser.add_argument("--suffix", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    for path in options.models:
        measure(path, options.prefix, options.suffix, options.pairs)


if __name__ == "__main__":
    main()
