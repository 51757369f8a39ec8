"""Computes the beams that every engine has to reproduce, with transformers' own beam search."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from model_pack import golden

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import LlamaForCausalLM

PROMPTS = (golden.OPENING, golden.SHORT_TALE, "Once upon a time", "One evening", "A short")
CASES: tuple[dict[str, Any], ...] = (
    {"n_beams": 1, "max_tokens": 24, "length_penalty": 1.0, "early_stopping": True},
    {"n_beams": 2, "max_tokens": 24, "length_penalty": 1.0, "early_stopping": True},
    {"n_beams": 4, "max_tokens": 32, "length_penalty": 1.0, "early_stopping": True},
    {"n_beams": 4, "max_tokens": 64, "length_penalty": 1.0, "early_stopping": False},
    {"n_beams": 5, "max_tokens": 64, "length_penalty": 2.0, "early_stopping": True},
    {"n_beams": 5, "max_tokens": 64, "length_penalty": 2.0, "early_stopping": False},
    {"n_beams": 3, "max_tokens": 64, "length_penalty": 0.0, "early_stopping": False},
    {"n_beams": 6, "max_tokens": 64, "length_penalty": -1.0, "early_stopping": True},
)


def beams(model: LlamaForCausalLM, tokens: list[int], case: dict[str, Any]) -> list[dict[str, Any]]:
    """All beams of one prompt, best first: tokens without the end token, and the score."""
    ends = set(model.generation_config.eos_token_id)
    with torch.inference_mode():
        output = model.generate(
            input_ids=torch.tensor([tokens]),
            attention_mask=torch.ones((1, len(tokens)), dtype=torch.long),
            do_sample=False,
            num_beams=case["n_beams"],
            num_return_sequences=case["n_beams"],
            max_new_tokens=case["max_tokens"],
            length_penalty=case["length_penalty"],
            early_stopping=case["early_stopping"],
            return_dict_in_generate=True,
            output_scores=True,
        )
    scores = getattr(output, "sequences_scores", None)
    found = []
    for place, sequence in enumerate(output.sequences.tolist()):
        made = sequence[len(tokens) :]
        n = next((i for i, token in enumerate(made) if token in ends), len(made))
        score = None if scores is None else float(scores[place])
        found.append({"tokens": made[:n], "ended": n < len(made), "score": score})
    return found


def write(folder: Path, target: Path) -> None:
    """Write the beams of each prompt in each case, as JSON."""
    model, tokenizer = golden.load(folder)
    cases = []
    for text in PROMPTS:
        tokens = tokenizer(text)["input_ids"]
        cases += [
            {"text": text, "tokens": tokens, **case, "beams": beams(model, tokens, case)}
            for case in CASES
        ]
    target.write_text(json.dumps(cases, ensure_ascii=False, separators=(",", ":")) + "\n")
