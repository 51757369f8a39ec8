"""Prefill and decode, in turns with what users would pick instead, on the same file and threads.

A GGUF file: infercore's context and session, a hand-written ctypes loop, `Llama.eval`,
`Llama.generate` and `Llama.create_completion`, with --bin llama.cpp's own ``llama-bench`` behind as
many tokens, and ``infercore bench`` (each a process of its own in each turn). An OpenVINO folder:
infercore's context and session as they come, and told to compute accurately;
`openvino_genai.LLMPipeline` likewise.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any

import pairs
import rivals
from by_hand import RawLoop

import infercore as ic
from infercore.measuring import parts
from infercore.measuring.stats import in_turns

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

Decode = Callable[[int], tuple[list[int], float]]
"""Takes the number of the turn; gives the tokens, if they can be compared, and the seconds."""

N_BEFORE = 64
ACCURATE, AS_IT_COMES = "infercore, accurate", "LLMPipeline as it comes"
ALIKE = {ACCURATE: "LLMPipeline, alike"}
"""Who is compared with whom: what is told to compute accurately with what is told the same."""


class Check:
    """Remembers the tokens of the first contender; the others must choose the same ones."""

    def __init__(self) -> None:
        self._tokens: dict[int, list[int]] = {}
        self.differ: set[str] = set()

    def seconds(self, name: str, turn: int, found: tuple[list[int], float]) -> float:
        """Note whether ``name`` chose other tokens in its turn, and return its seconds."""
        tokens, seconds = found
        first = self._tokens.setdefault(turn, tokens)
        n = min(len(tokens), len(first))
        if tokens[:n] != first[:n]:
            self.differ.add(name)
        return seconds

    def notes(self) -> dict[str, str]:
        return dict.fromkeys(self.differ, "chose other tokens (a near tie)")


def streamed(session: ic.Session, text: str, n: int) -> tuple[list[int], float]:
    """The tokens after ``text`` and the seconds that a stream takes after its first token."""
    session.ensure_prefix(text)
    return parts.stream_s(session, n)


@contextmanager
def opened(
    path: str, options: argparse.Namespace, turn: int
) -> Iterator[tuple[dict[str, Callable[[], float]], dict[str, Decode]]]:
    """All that run a GGUF file, loaded anew: another one first in each turn.

    Weights in another layout are copies, and those of the first model that a process loads are up
    to a tenth faster.
    """
    n, n_prefill, threads = options.tokens, options.prefill, options.threads
    n_ctx = max(n_prefill, N_BEFORE + n) + 64
    fields = {"n_ctx": n_ctx, "n_threads": threads}
    on_gpu = {"n_gpu_layers": options.n_gpu_layers}
    with ExitStack() as stack:

        def own() -> tuple[ic.Model, ic.Context, ic.Session]:
            model = stack.enter_context(ic.load_model(path, backend="llamacpp", **on_gpu))
            context = stack.enter_context(model.new_context(**fields))
            return model, context, stack.enter_context(model.new_session(**fields))

        def rival() -> Any:
            return stack.enter_context(closing(rivals.llama(path, **fields, **on_gpu)))

        def by_hand() -> RawLoop:
            return stack.enter_context(closing(RawLoop(path, n_ctx, threads, **on_gpu)))

        openers: dict[str, Callable[[], Any]] = {"own": own, "rival": rival, "raw": by_hand}
        of = {name: openers[name]() for name in pairs.rotated(openers, turn)}
        (model, context, session), llama, raw = of["own"], of["rival"], of["raw"]
        prompt = parts.ids_of(model.tokenizer, n_prefill)
        text = parts.text_of(model.tokenizer, N_BEFORE)
        ids = model.tokenizer.encode(text)
        sampler = model.new_sampler(temperature=0)
        prefill = {
            "infercore": lambda: n_prefill / parts.prefill_s(context, prompt),
            "ctypes loop": lambda: n_prefill / raw.prefill_s(prompt),
            "Llama.eval": lambda: n_prefill / rivals.llama_prefill_s(llama, prompt),
        }
        decode: dict[str, Decode] = {
            "infercore": lambda _: parts.decode_s(context, sampler, ids, n),
            "infercore session": lambda _: streamed(session, text, n),
            "ctypes loop": lambda _: raw.run(ids, n),
            "Llama.generate": lambda _: rivals.llama_generate_s(llama, ids, n),
        }
        if not options.no_completion:
            decode["Llama.create_completion"] = lambda _: (
                [],
                rivals.llama_completion_s(llama, ids, n),
            )
        if options.bin:
            decode["llama-bench"] = lambda _: (
                [],
                rivals.llama_bench_s(options, path, n, depth=N_BEFORE),
            )
            decode["infercore bench"] = lambda _: (
                [],
                rivals.infercore_bench_s(path, n, n_threads=threads),
            )
        yield prefill, decode


def gguf(path: str, options: argparse.Namespace) -> list[pairs.Row]:
    check = Check()
    prefilled: dict[str, list[float]] = {}
    decoded: dict[str, list[float]] = {}
    for turn in range(options.rounds):
        with opened(path, options, turn) as (prefill, decode):
            if turn < options.prefill_rounds:
                pairs.take_turn(prefilled, prefill, turn)
            pairs.take_turn(decoded, in_their_turns(decode, check, options.tokens), turn)
    return told(path, prefilled, decoded, check, options)


def folder(path: str, options: argparse.Namespace) -> list[pairs.Row]:
    n, n_prefill = options.tokens, options.prefill
    fields = {"n_ctx": max(n_prefill, N_BEFORE + n) + 64, "n_threads": options.threads}
    accurate = rivals.pipeline(path, n_threads=options.threads)
    as_it_comes = rivals.pipeline(path, n_threads=options.threads, kv=None)
    with (
        ic.load_model(path, backend="openvino") as model,
        model.new_context(**fields) as context,
        model.new_session(**fields) as session,
        model.new_context(**fields, precision="accurate") as exact,
    ):
        # Another prompt in each turn: the pipeline's cache of prefixes would spare it the prefill,
        # and with it the step from a long input to a short one, for which the engine prepares.
        texts = [parts.text_of(model.tokenizer, N_BEFORE, i) for i in range(options.rounds + 1)]
        ids = [model.tokenizer.encode(text) for text in texts]
        sampler, check, fresh = model.new_sampler(temperature=0), Check(), Fresh(model, n_prefill)
        prefill = {
            "infercore": lambda: n_prefill / parts.prefill_s(context, fresh.ids()),
            ACCURATE: lambda: n_prefill / parts.prefill_s(exact, fresh.ids()),
            ALIKE[ACCURATE]: lambda: n_prefill / fresh.seconds(accurate),
            AS_IT_COMES: lambda: n_prefill / fresh.seconds(as_it_comes),
        }
        decode: dict[str, Decode] = {
            "infercore": lambda i: parts.decode_s(context, sampler, ids[i], n),
            "infercore session": lambda i: streamed(session, texts[i], n),
            ACCURATE: lambda i: ([], parts.decode_s(exact, sampler, ids[i], n)[1]),
            ALIKE[ACCURATE]: lambda i: ([], after_first(accurate, ids[i], n)[1]),
            AS_IT_COMES: lambda i: ([], after_first(as_it_comes, ids[i], n)[1]),
        }
        print(f"{pairs.name_of(path)}: {in_force(context)}; accurate: {in_force(exact)}")
        return measured(path, prefill, decode, check, options)


def in_force(context: ic.Context) -> str:
    """What the engine computes in, and what it keeps keys and values in."""
    told = context.effective
    return f"activations {told['activations']}, KV {told['type_k']}"


class Fresh:
    """Prompts that no cache of prefixes has seen."""

    def __init__(self, model: ic.Model, n_tokens: int) -> None:
        self._ids = parts.ids_of(model.tokenizer, n_tokens)
        self._turn = 0

    def ids(self) -> list[int]:
        """Return the next prompt: other tokens from its first one on."""
        self._turn += 1
        first = self._ids[1:][self._turn : self._turn + 1]
        return [*self._ids[:1], *first, self._ids[-self._turn], *self._ids[3:]]

    def seconds(self, pipe: Any) -> float:
        return rivals.pipeline_run(pipe, self.ids(), 1)[1] / 1e3


def after_first(pipe: Any, ids: list[int], n: int) -> tuple[list[int], float]:
    tokens, _, seconds = rivals.pipeline_run(pipe, ids, n + 1)
    return tokens[:n], seconds


def in_its_turn(name: str, run: Decode, check: Check, n: int) -> Callable[[], float]:
    """What gives the tokens a second of ``run``, which is told the number of its turn."""
    turns = itertools.count()

    def work() -> float:
        turn = next(turns)
        return n / check.seconds(name, turn, run(turn))

    return work


def in_their_turns(
    decode: Mapping[str, Decode], check: Check, n: int
) -> dict[str, Callable[[], float]]:
    """What gives the tokens a second of each."""
    return {name: in_its_turn(name, run, check, n) for name, run in decode.items()}


def measured(
    path: str,
    prefill: Mapping[str, Callable[[], float]],
    decode: Mapping[str, Decode],
    check: Check,
    options: argparse.Namespace,
) -> list[pairs.Row]:
    runs = in_their_turns(decode, check, options.tokens)
    found = []
    for each, rounds in (
        (prefill, min(options.rounds, options.prefill_rounds)),
        (runs, options.rounds),
    ):
        in_turns(each, 1)
        found.append(in_turns(each, rounds))
    return told(path, *found, check, options)


def told(
    path: str,
    prefilled: Mapping[str, Sequence[float]],
    decoded: Mapping[str, Sequence[float]],
    check: Check,
    options: argparse.Namespace,
) -> list[pairs.Row]:
    rows = []
    for figure, values, notes in (
        (f"prefill of {options.prefill}", prefilled, None),
        (f"decode of {options.tokens} after {N_BEFORE}", decoded, check.notes()),
    ):
        own = [each for each in values if each.startswith("infercore")]
        rows += pairs.rows_of(
            values,
            model=pairs.name_of(path),
            figure=figure,
            unit="tokens/s",
            notes=notes,
            own=own,
        )
    return [row for row in rows if is_fair(row.by)]


def is_fair(pair: str) -> bool:
    """Leave out ratios of one that rounds over one that does not."""
    one, _, other = pair.partition(" / ")
    return not other or (one in ALIKE) == (other in ALIKE.values())


def main() -> None:
    parser = pairs.parser(__doc__, rounds=7)
    parser.add_argument("models", nargs="+", help="GGUF files and OpenVINO folders")
    parser.add_argument("--tokens", type=int, default=48, help="tokens decoded in each turn")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of a prefill")
    parser.add_argument("--prefill-rounds", type=int, default=3)
    parser.add_argument(
        "--no-completion", action="store_true", help="leave Llama.create_completion out"
    )
    rivals.add_programs(parser)
    options = parser.parse_args()
    rows = []
    for path in options.models:
        rows += (folder if os.path.isdir(path) else gguf)(path, options)
    pairs.finish("throughput", rows, options)


if __name__ == "__main__":
    main()
