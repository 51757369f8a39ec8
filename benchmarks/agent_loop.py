"""An agent's loop: a long instruction, then turns that each add a result and ask again.

The answers are as long as asked for and say one word (the weights are random). In the variant
"edited" the first half of each answer is a thought, which the template leaves out of the turns
after it, as those of reasoning models do: so the history changes behind the last prompt. In
"kept" nothing is left out. Both contenders keep their own messages, take their turns one after
the other, and get the whole list of messages each time, streamed to the end of the answer.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

import attrs
import pairs
import rivals

import infercore as ic
from infercore.measuring import parts

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

VARIANTS = ("edited", "kept")


@attrs.define
class Chat:
    """One contender: its messages, and what its turns took."""

    stream: Callable[[Sequence[dict[str, str]]], Iterator[str]]
    messages: list[dict[str, str]]
    seconds: list[float] = attrs.field(factory=list)
    first_ms: list[float] = attrs.field(factory=list)

    def turn(self, text: str, *, edited: bool) -> str:
        """Ask with ``text``, and enter the answer; with a thought where it is to be edited."""
        self.messages.append({"role": "user", "content": text})
        begun, first, answer = perf_counter(), 0.0, ""
        for piece in self.stream(self.messages):
            first = first or perf_counter()
            answer += piece
        self.seconds.append(perf_counter() - begun)
        self.first_ms.append((first - begun) * 1e3)
        half = len(answer) // 2
        content = f"{answer[:half]}</think>{answer[half:]}" if edited else answer
        self.messages.append({"role": "assistant", "content": content})
        return answer


def loop(path: str, variant: str, options: argparse.Namespace) -> list[pairs.Row]:
    n_ctx = options.instructions + options.turns * (options.result + options.answer + 24) + 128
    gpu = {"n_gpu_layers": options.n_gpu_layers}
    with (
        ic.load_model(path, backend="llamacpp", **gpu) as model,
        model.new_session(n_ctx=n_ctx, n_threads=options.threads) as session,
    ):
        tokenizer = model.tokenizer
        bias = rivals.steady_bias(tokenizer)
        system = parts.text_of(tokenizer, options.instructions)
        results = [parts.text_of(tokenizer, options.result, i + 1) for i in range(options.turns)]
        rival = rivals.llama(path, n_ctx=n_ctx, n_threads=options.threads, **gpu)
        evaluated = {"infercore": Counter(), "create_chat_completion": Counter()}
        own = evaluated["infercore"].of_session(session, max_tokens=options.answer, bias=bias)
        other = evaluated["create_chat_completion"].of_llama(rival, options.answer, bias)
        chats = {
            "infercore": new_chat(own, system),
            "create_chat_completion": new_chat(other, system),
        }
        run_turns(chats, results, edited=variant == "edited")
        rival.close()
    return rows(path, variant, options, chats, evaluated)


def new_chat(stream: Any, system: str) -> Chat:
    return Chat(stream=stream, messages=[{"role": "system", "content": system}])


def run_turns(chats: dict[str, Chat], results: Sequence[str], *, edited: bool) -> None:
    """Let all take each turn, begun by another one each time; their answers must be the same."""
    names = list(chats)
    for i, text in enumerate(results):
        order = names if i % 2 == 0 else names[::-1]
        answers = {chats[name].turn(text, edited=edited) for name in order}
        if len(answers) != 1:
            raise SystemExit(f"turn {i}: the answers differ: {answers}")


class Counter:
    """Counts the prompt tokens that a contender really evaluated."""

    def __init__(self) -> None:
        self.n = 0

    def of_session(self, session: ic.Session, *, max_tokens: int, bias: dict[int, float]) -> Any:
        def stream(messages: Sequence[dict[str, str]]) -> Iterator[str]:
            for chunk in session.chat(
                messages, max_tokens=max_tokens, temperature=0, logit_bias=bias
            ):
                if chunk.usage is not None:
                    self.n += chunk.usage.prompt_tokens - chunk.usage.cached_tokens
                if chunk.text:
                    yield chunk.text

        return stream

    def of_llama(self, model: Any, max_tokens: int, bias: dict[int, float]) -> Any:
        own = model.eval

        def counting(tokens: Sequence[int]) -> None:
            if len(tokens) > 1:  # a token alone is one of the answer
                self.n += len(tokens)
            own(tokens)

        model.eval = counting

        def stream(messages: Sequence[dict[str, str]]) -> Iterator[str]:
            for chunk in model.create_chat_completion(
                messages, max_tokens=max_tokens, temperature=0.0, logit_bias=bias, stream=True
            ):
                text = chunk["choices"][0]["delta"].get("content")
                if text:
                    yield text

        return stream


def rows(
    path: str,
    variant: str,
    options: argparse.Namespace,
    chats: dict[str, Chat],
    evaluated: dict[str, Counter],
) -> list[pairs.Row]:
    """The whole loop, all turns but the first (which is cold for everybody), the first tokens."""
    name, notes = pairs.name_of(path), {k: f"{c.n} evaluated" for k, c in evaluated.items()}
    size = f"{variant} history, {options.turns} turns"
    whole = {k: [sum(chat.seconds)] for k, chat in chats.items()}
    later = {k: [sum(chat.seconds[1:])] for k, chat in chats.items()}
    first = {k: chat.first_ms[1:] for k, chat in chats.items()}
    made = pairs.rows_of(whole, model=name, figure=f"{size}, all", unit="s", notes=notes)
    made += pairs.rows_of(later, model=name, figure=f"{size}, after the first", unit="s")
    return made + pairs.rows_of(
        first, model=name, figure=f"{size}, first token of a turn", unit="ms"
    )


def main() -> None:
    parser = pairs.parser(__doc__, rounds=1)
    parser.add_argument("models", nargs="+", help="GGUF files, as make_model.py writes them")
    parser.add_argument("--variant", choices=VARIANTS, action="append")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--instructions", type=int, default=1024, help="tokens before the turns")
    parser.add_argument("--result", type=int, default=32, help="tokens that a turn adds")
    parser.add_argument("--answer", type=int, default=16, help="tokens that it generates")
    options = parser.parse_args()
    found = []
    for path in options.models:
        for variant in options.variant or VARIANTS:
            for _ in range(options.rounds):
                found += loop(path, variant, options)
    pairs.finish("agent_loop", found, options)


if __name__ == "__main__":
    main()
