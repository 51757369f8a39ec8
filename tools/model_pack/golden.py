"""Computes what every engine has to reproduce: logits of prompts and greedy continuations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

MAX_NEW_TOKENS = 256

OPENING = "Once upon a time there was a baker named Mira"
LONG = (
    "Once upon a time there was a clockmaker named Anton, who lived near the market town. Anton "
    "was very curious, and even the birds knew it. His best friend was Zoë, who never went "
    "anywhere without a sleepy owl.\n\nOne evening a letter came under the door. It was sealed "
    'with the sign ⏰ and it said: "Whoever walks the road for three days will find the lost '
    'hour." "Every lock'
)
UNICODE = (
    "Once upon a time there was a fiddler named Selma, who lived near the whale cave. Selma was "
    "very merry, and everyone on the road knew it. Her best friend was André, who never"
)
SHORT_TALE = "A short tale about Oskar."
CHAT = (
    {"role": "system", "content": "You are a storyteller."},
    {"role": "user", "content": "Whose sign is 🐑?"},
    {"role": "assistant", "content": "🐑 is the sign of Felix."},
    {"role": "user", "content": "What is Lien looking for?"},
)


@dataclass(frozen=True)
class Continuation:
    """One greedy path: its tokens, and how far the best logit stood above the second one."""

    tokens: list[int]
    gaps: list[float]


def prompts(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """A short opening, a long one, one with accents, a short tale and a chat in several turns."""
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    return [OPENING, LONG, UNICODE, SHORT_TALE, str(rendered)]


def load(folder: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Model and tokenizer, in float32 and with the plainest attention."""
    model = LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def logits_of(model: LlamaForCausalLM, tokens: list[int]) -> NDArray[np.float32]:
    """Logits of every position, [n_tokens, n_vocab]."""
    with torch.inference_mode():
        logits: NDArray[np.float32] = model(input_ids=torch.tensor([tokens])).logits[0].numpy()
    return logits


def greedy(model: LlamaForCausalLM, tokens: list[int], limit: int = MAX_NEW_TOKENS) -> Continuation:
    """Argmax until an end token, which is not kept, or until the limit."""
    ends = set(model.generation_config.eos_token_id)
    path = Continuation([], [])
    step, cache = tokens, None
    while len(path.tokens) < limit:
        token, gap, cache = _choose(model, step, cache)
        path.gaps.append(gap)
        if token in ends:
            break
        path.tokens.append(token)
        step = [token]
    return path


def _choose(model: LlamaForCausalLM, step: list[int], cache: Any) -> tuple[int, float, Any]:
    """Evaluate some tokens; the best next one, its lead over the second, and the cache."""
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([step]), past_key_values=cache, use_cache=True)
    values, indices = output.logits[0, -1].topk(2)
    return int(indices[0]), float(values[0] - values[1]), output.past_key_values


def write(
    folder: Path,
    target: Path,
    prompts: Callable[[PreTrainedTokenizerFast], list[str]] = prompts,
) -> list[float]:
    """Write the golden file; the gaps of all greedy steps."""
    model, tokenizer = load(folder)
    arrays: dict[str, Any] = {}
    gaps: list[float] = []
    texts = prompts(tokenizer)
    for number, text in enumerate(texts):
        tokens = tokenizer(text)["input_ids"]
        path = greedy(model, tokens)
        gaps += path.gaps
        arrays[f"tokens_{number}"] = np.array(tokens, dtype=np.int32)
        arrays[f"logits_{number}"] = logits_of(model, tokens)
        arrays[f"greedy_{number}"] = np.array(path.tokens, dtype=np.int32)
    limit = np.array(MAX_NEW_TOKENS)
    np.savez_compressed(target, prompts=np.array(texts), max_new_tokens=limit, **arrays)
    return gaps


def gap_statistics(gaps: list[float]) -> dict[str, float]:
    """Smallest, first percentile and median of the gaps between the two best logits."""
    values = np.array(gaps)
    return {
        "n_steps": len(values),
        "min": float(values.min()),
        "first_percentile": float(np.percentile(values, 1)),
        "median": float(np.median(values)),
    }
