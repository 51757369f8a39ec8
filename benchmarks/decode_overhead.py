"""What `decode_one` and greedy sampling cost over a hand-written ctypes loop, in paired runs.

With one thread the engine works in the caller's, so its CPU time can be told: it leaves out what
other processes took, which wall time does not.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from typing import Any

import llama_cpp.llama_cpp as llama
import numpy as np

import infercore as ic

clock = time.perf_counter


class RawLoop:
    """llama.cpp driven by hand: one token a call, argmax over the row in place."""

    def __init__(self, path: str, n_ctx: int, n_threads: int) -> None:
        self._keep = llama.llama_log_callback(lambda *_: None)
        llama.llama_log_set(self._keep, None)
        llama.llama_backend_init()
        model = llama.llama_load_model_from_file(path.encode(), llama.llama_model_default_params())
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_threads, params.n_threads_batch = n_ctx, n_threads, n_threads
        params.flash_attn_type = 0
        self._context = llama.llama_init_from_model(model, params)
        self._memory = llama.llama_get_memory(self._context)
        self._n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        self._batch = llama.llama_batch_init(512, 0, 1)

    def run(self, prompt: list[int], n_tokens: int) -> tuple[list[int], float]:
        """Return the greedy tokens after ``prompt``, and the seconds they took."""
        llama.llama_memory_clear(self._memory, True)
        self._decode(prompt, 0)
        started = clock()
        tokens, position = [], len(prompt)
        for _ in range(n_tokens):
            token = self._argmax()
            tokens.append(token)
            self._decode_one(token, position)
            position += 1
        return tokens, clock() - started

    def _decode(self, tokens: list[int], position: int) -> None:
        batch = self._batch
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, position + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = i == len(tokens) - 1
        batch.n_tokens = len(tokens)
        assert llama.llama_decode(self._context, batch) == 0  # noqa: S101

    def _decode_one(self, token: int, position: int) -> None:
        batch = self._batch
        batch.n_tokens = 1
        batch.token[0], batch.pos[0], batch.logits[0] = token, position, True
        llama.llama_decode(self._context, batch)

    def _argmax(self) -> int:
        row = llama.llama_get_logits_ith(self._context, -1)
        array = (ctypes.c_float * self._n_vocab).from_address(ctypes.addressof(row.contents))
        return int(np.frombuffer(array, dtype=np.float32).argmax())


def neutral(
    context: ic.Context, sampler: ic.Sampler, prompt: list[int], n_tokens: int
) -> tuple[list[int], float]:
    """The same through infercore's engine level."""
    context.clear()
    context.decode(prompt)
    started = clock()
    tokens = []
    for _ in range(n_tokens):
        token = sampler.sample(context)
        tokens.append(token)
        context.decode_one(token)
    return tokens, clock() - started


def measure(path: str, n_tokens: int, n_pairs: int, n_threads: int) -> None:
    n_ctx = n_tokens + 128
    raw = RawLoop(path, n_ctx, n_threads)
    with ic.load_model(path, backend="llamacpp") as model:
        fields: dict[str, Any] = {"n_threads": n_threads, "n_threads_batch": n_threads}
        with model.new_context(n_ctx=n_ctx, flash_attn="off", **fields) as context:
            prompt = model.tokenizer.encode("Once upon a time there was a baker")
            pairs = [
                run_pair(raw, context, model.new_sampler(temperature=0), prompt, n_tokens, i)
                for i in range(n_pairs)
            ]
    report(pairs, n_tokens)


def run_pair(
    raw: RawLoop, context: Any, sampler: Any, prompt: list[int], n_tokens: int, turn: int
) -> tuple[float, float]:
    runs = [lambda: raw.run(prompt, n_tokens), lambda: neutral(context, sampler, prompt, n_tokens)]
    first, second = runs if turn % 2 == 0 else reversed(runs)
    a, b = first(), second()
    by_hand, through = (a, b) if turn % 2 == 0 else (b, a)
    if by_hand[0] != through[0]:
        raise SystemExit("the two loops chose different tokens")
    return by_hand[1], through[1]


def report(pairs: list[tuple[float, float]], n_tokens: int) -> None:
    ratios = [through / by_hand for by_hand, through in pairs]
    extra = [(through - by_hand) / n_tokens * 1e6 for by_hand, through in pairs]
    by_hand = statistics.median(pair[0] for pair in pairs) / n_tokens * 1e6
    ratio = statistics.median(ratios)
    print(f"by hand {by_hand:.1f} us a token; infercore / by hand: median {ratio:.4f}")
    print(f"extra a token: median {statistics.median(extra):.1f} us, least {min(extra):.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu", action="store_true", help="CPU time; for one thread")
    options = parser.parse_args()
    if options.cpu:
        globals()["clock"] = time.thread_time
    measure(options.model, options.tokens, options.pairs, options.threads)


if __name__ == "__main__":
    main()
