"""What choosing a token costs: the portable sampler and a constraint's mask, medians of many."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import infercore as ic
from infercore.sampling import PortableSampler, compile_constraint

if TYPE_CHECKING:
    from collections.abc import Callable

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
CHAINS: dict[str, dict[str, Any]] = {
    "default chain": {},
    "greedy": {"temperature": 0},
    "default, penalties": {"repeat_penalty": 1.1, "frequency_penalty": 0.1},
    "default, 100 biases": {"logit_bias": dict.fromkeys(range(100, 200), -1.0)},
    "no top_k": {"top_k": 0},
    "every step": {
        "top_n_sigma": 3.0,
        "typical_p": 0.95,
        "xtc_probability": 0.5,
        "dynatemp_range": 0.2,
        "repeat_penalty": 1.1,
        "dry_multiplier": 0.5,
    },
}


class Words:
    """A vocabulary of bytes and made-up words, with an end of sequence."""

    bos = None

    def __init__(self, n_vocab: int) -> None:
        self.n_vocab, self.eos = n_vocab, n_vocab - 1
        syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
        count = len(syllables)
        words = (
            (" " if n % 2 else "") + syllables[n % count] + syllables[n // count % count] + str(n)
            for n in range(n_vocab - 257)
        )
        self.words = [bytes([n]) for n in range(256)] + [word.encode() for word in words]

    def token_bytes(self, token: int) -> bytes:
        return b"<eos>" if token == self.eos else self.words[token]

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def is_eog(self, token: int) -> bool:
        return token == self.eos

    is_control = is_eog


def rows(n_vocab: int, n: int) -> list[np.ndarray]:
    """Logits like a model's: mostly far below a few likely tokens."""
    random = np.random.default_rng(0)
    shape = (n, n_vocab)
    logits = random.standard_normal(shape) * 2.5 + random.exponential(0.7, shape)
    return list(logits.astype(np.float32))


def median_us(work: Callable[[int], object], n: int) -> tuple[float, float]:
    """The median and the least time of ``n`` calls, microseconds; a tenth more come before."""
    for i in range(n // 10 + 1):
        work(i)
    times = []
    for i in range(n):
        started = time.perf_counter()
        work(i)
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6, min(times) * 1e6


def show(name: str, cost: tuple[float, float]) -> None:
    print(f"{name:<24} median {cost[0]:8.1f} us, least {cost[1]:8.1f} us")


def measure_chains(tokenizer: Words, n: int) -> None:
    some = rows(tokenizer.n_vocab, 8)
    for name, fields in CHAINS.items():
        config = ic.SamplingConfig(seed=1, **fields)
        sampler = PortableSampler(config, tokenizer=tokenizer, n_vocab=tokenizer.n_vocab)
        sampler.observe(list(range(64)))
        show(name, median_us(lambda i, s=sampler: s.sample_logits(some[i % 8]), n))


def measure_mask(tokenizer: Words, n: int) -> None:
    started = time.perf_counter()
    compile_constraint(SCHEMA, tokenizer)
    print(f"first constraint (reads the vocabulary): {time.perf_counter() - started:.2f} s")
    show("compile a schema", median_us(lambda _: compile_constraint(SCHEMA, tokenizer), 20))
    row = rows(tokenizer.n_vocab, 1)[0]
    within = {"mask within a string": b'{"name":"ba', "mask within a number": b'{"name":"","n":1'}
    for name, text in within.items():
        constraint = compile_constraint(SCHEMA, tokenizer)
        constraint.accept_all(list(text))
        show(name, median_us(lambda _, c=constraint: c.apply(row), n))
    measure_walk(tokenizer, row, n)


def measure_walk(tokenizer: Words, row: np.ndarray, n: int) -> None:
    """Mask and accept along a text, so that no state is met twice in a row."""
    text = b'{"name":"' + b"ba du ke mi " * 40
    times = []
    for _ in range(max(1, n // len(text))):
        constraint = compile_constraint(SCHEMA, tokenizer)
        for byte in text:
            started = time.perf_counter()
            constraint.apply(row)
            constraint.accept(byte)
            times.append(time.perf_counter() - started)
    show("mask and accept, walking", (statistics.median(times) * 1e6, min(times) * 1e6))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    tokenizer = Words(options.vocabulary)
    print(f"vocabulary of {options.vocabulary}, {options.steps} steps each")
    measure_chains(tokenizer, options.steps)
    measure_mask(tokenizer, options.steps)


if __name__ == "__main__":
    main()
