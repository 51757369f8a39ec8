"""What guessing ahead gains, against plain decoding of the same tokens, in paired runs.

Prompt lookup on a refrain, and a draft model on a plain story. With the model that ``make_wide.py``
writes, a draft saves what it saves where decoding costs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import infercore as ic
import infercore_models

FORMATS = {"llamacpp": "gguf-f32", "openvino": "openvino"}
EXACT = {"precision": "accurate", "flash_attn": "off", "type_k": "f32", "type_v": "f32"}
START = "Once upon a time. "
REFRAIN = "The baker sang a song. The miller sang a song. "


def refrain_bias(model: Any, text: str) -> dict[int, float]:
    """A bias under which the model goes on with the words of ``text``."""
    return dict.fromkeys(model.tokenizer.encode(text, add_special=False), 12.0)


def decode(session: Any, prompt: str, config: Any, **fields: Any) -> tuple[list[int], float, Any]:
    """The tokens, the seconds they took from the first step on, and the usage."""
    session.ensure_prefix(prompt)
    started = time.perf_counter()
    chunks = list(session.decode(temperature=0, speculative=config, **fields))
    seconds = time.perf_counter() - started
    return [token for chunk in chunks for token in chunk.tokens], seconds, chunks[-1].usage


def measure(
    model: Any, session: Any, name: str, config: Any, *, n_pairs: int, prompt: str, **fields: Any
) -> None:
    ratios, speeds, usage = [], [], None
    for turn in range(n_pairs):
        order = (None, config) if turn % 2 == 0 else (config, None)
        runs = {each is None: decode(session, prompt, each, **fields) for each in order}
        plain, guessed = runs[True], runs[False]
        if plain[0] != guessed[0]:
            raise SystemExit(f"{model.backend}, {name}: other tokens than without guesses")
        ratios.append(plain[1] / guessed[1])
        speeds.append((len(plain[0]) / plain[1], len(plain[0]) / guessed[1]))
        usage = guessed[2]
    report(model.backend, name, ratios, speeds, usage)


def report(
    backend: str, name: str, ratios: list[float], speeds: list[tuple[float, float]], usage: Any
) -> None:
    plain, guessed = (statistics.median(column) for column in zip(*speeds, strict=True))
    drafted = max(1, usage.drafted_tokens)
    print(
        f"{backend:<9} {name:<28} {usage.completion_tokens} tokens, same; accepted "
        f"{usage.accepted_tokens}/{usage.drafted_tokens} ({usage.accepted_tokens / drafted:.0%}); "
        f"{plain:.0f} -> {guessed:.0f} tokens/s, speed-up median {statistics.median(ratios):.2f}"
    )


def run_backend(backend: str, path: Any, draft_path: Any, options: Any) -> None:
    """Prompt lookup on a refrain; a draft model, which knows no bias, on a plain story."""
    names = ("n_threads", "n_threads_batch") if backend == "llamacpp" else ("n_threads",)
    threads = dict.fromkeys(names, options.threads)
    common = {"max_tokens": options.tokens, "ignore_eos": True, "n_pairs": options.pairs}
    with (
        ic.load_model(path, backend=backend) as model,
        ic.load_model(draft_path, backend=backend) as draft,
        model.new_session(n_ctx=options.tokens + 256, **threads, **EXACT) as session,
    ):
        refrain = {"prompt": START + REFRAIN * 3, "logit_bias": refrain_bias(model, REFRAIN)}
        measure(model, session, "auto, on a refrain", "auto", **refrain, **common)
        measure(model, session, "auto, on a story", "auto", prompt=START, **common)
        for n_draft in (4, 8):
            config = ic.SpeculativeConfig(n_draft=n_draft)
            name = f"prompt lookup, n_draft={n_draft}"
            measure(model, session, name, config, **refrain, **common)
        for n_draft in (4, 8):
            config = ic.SpeculativeConfig(kind="draft_model", draft_model=draft, n_draft=n_draft)
            name = f"draft model, n_draft={n_draft}"
            measure(model, session, name, config, prompt=START, **common)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="a model file; default: the model pack's")
    parser.add_argument("--draft", help="the draft model's file; default: the model pack's")
    parser.add_argument("--backend", action="append", choices=sorted(FORMATS))
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    for backend in options.backend or FORMATS:
        path = options.model or infercore_models.path("storyteller", FORMATS[backend])
        draft = options.draft or infercore_models.path("storyteller-draft", FORMATS[backend])
        run_backend(backend, path, draft, options)


if __name__ == "__main__":
    main()
