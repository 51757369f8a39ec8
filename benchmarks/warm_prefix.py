"""Time to the first token over the length of the prefix, cold and warm, beside what others take.

Cold: nothing of the prompt is in any cache. Warm: the same prefix again, with another suffix.
Beside infercore's session: `Llama.generate` on a GGUF file, `openvino_genai.LLMPipeline`, whose
cache of prefixes is on, on an OpenVINO folder. They get token ids; the session tokenizes its text.
The pipeline's cache keeps whole blocks of 32 tokens: with --spread each round has a prefix of
another length, as many tokens as named and 8 more in each round, up to 24.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pairs
import rivals

import infercore as ic
from infercore.measuring import parts
from infercore.measuring.stats import in_turns

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

TOKENS_A_CONTENDER = 8_500  # shorter prefixes have more rounds, so that all take about as long
CONTENDERS = 2
BLOCK, STEP = 32, 8  # tokens


class Prompts:
    """Prefixes that no cache has seen, and for each of them two suffixes."""

    def __init__(self, tokenizer: ic.Tokenizer, n_prefix: int, n_suffix: int, step: int) -> None:
        self._tokenizer, self._n_prefix, self._n_suffix = tokenizer, n_prefix, n_suffix
        self._step, self._turn = step, 0

    def next(self) -> tuple[str, str, str]:
        """Return a prefix and two suffixes."""
        longer = self._turn // CONTENDERS * self._step % BLOCK
        self._turn += 1
        head = f"{chr(97 + self._turn % 26)}{self._turn} "
        n = self._n_prefix + longer - len(self._tokenizer.encode(head))
        prefix = head + parts.text_of(self._tokenizer, n, self._turn)
        suffixes = (
            " " + parts.text_of(self._tokenizer, self._n_suffix, 3 * self._turn + i)
            for i in range(2)
        )
        return (prefix, *suffixes)


Run = tuple[float, float]  # milliseconds: cold, warm


def of_session(model: ic.Model, prompts: Prompts, n_ctx: int, n_threads: int) -> Run:
    prefix, first, second = prompts.next()
    with model.new_session(n_ctx=n_ctx, n_threads=n_threads) as session:
        cold = parts.first_token(session, prefix, first)
        warm = parts.first_token(session, prefix, second)
    return cold.ms, warm.ms


def of_rival(
    tokenizer: ic.Tokenizer, prompts: Prompts, first_ms: Callable[[list[int]], float]
) -> Run:
    prefix, first, second = prompts.next()
    return first_ms(tokenizer.encode(prefix + first)), first_ms(tokenizer.encode(prefix + second))


def measure(path: str, options: argparse.Namespace) -> list[pairs.Row]:
    is_folder = os.path.isdir(path)
    gpu = {} if is_folder else {"n_gpu_layers": options.n_gpu_layers}
    longest = max(options.prefix)
    room = longest + options.suffix + 64
    rows = []
    with ic.load_model(path, backend="openvino" if is_folder else "llamacpp", **gpu) as model:
        other, first_ms = rival(path, room, options)
        for n_prefix in options.prefix:
            step = STEP if options.spread else 0
            prompts = Prompts(model.tokenizer, n_prefix, options.suffix, step)
            n_ctx = n_prefix + options.suffix + 64
            runs = {
                "infercore": lambda p=prompts, n=n_ctx: of_session(model, p, n, options.threads),
                other: lambda p=prompts: of_rival(model.tokenizer, p, first_ms),
            }
            n_rounds = max(1, min(options.rounds, TOKENS_A_CONTENDER // n_prefix))
            found = in_turns(runs, n_rounds)
            for i, kind in enumerate(("cold", "warm")):
                values = {name: [run[i] for run in took] for name, took in found.items()}
                lengths = f"{n_prefix} to {n_prefix + BLOCK - STEP}" if step else str(n_prefix)
                figure = f"{kind}, {lengths} + {options.suffix}"
                rows += pairs.rows_of(values, model=pairs.name_of(path), figure=figure, unit="ms")
    return rows


def rival(
    path: str, n_ctx: int, options: argparse.Namespace
) -> tuple[str, Callable[[list[int]], float]]:
    if os.path.isdir(path):
        pipe = rivals.pipeline(path, n_threads=options.threads, kv=None)
        return "LLMPipeline as it comes", lambda ids: rivals.pipeline_first_ms(pipe, ids)
    model = rivals.llama(
        path, n_ctx=n_ctx, n_threads=options.threads, n_gpu_layers=options.n_gpu_layers
    )
    return "Llama.generate", lambda ids: rivals.llama_first_token_ms(model, ids)


def main() -> None:
    parser = pairs.parser(__doc__, rounds=5)
    parser.add_argument("models", nargs="+", help="GGUF files and OpenVINO folders")
    parser.add_argument(
        "--prefix", type=int, nargs="+", default=[128, 512, 2048], help="tokens of the prefixes"
    )
    parser.add_argument("--suffix", type=int, default=32)
    parser.add_argument("--spread", action="store_true", help="another length in each round")
    options = parser.parse_args()
    rows = [row for path in options.models for row in measure(path, options)]
    pairs.finish("warm_prefix", rows, options)


if __name__ == "__main__":
    main()
