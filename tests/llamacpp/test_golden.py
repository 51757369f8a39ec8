"""The engine's numbers, against those that transformers gave for the same weights."""

from __future__ import annotations

import numpy as np
import pytest


def greedy(context, row, n_tokens):
    tokens = []
    for _ in range(n_tokens):
        tokens.append(int(row.argmax()))
        context.decode_one(tokens[-1])
        row = context.logits(0)
    return tuple(tokens)


def test_tokens_are_the_golden_ones(story, golden):
    for prompt in golden.prompts:
        tokens = story.tokenizer.encode(prompt.text, add_special=True, parse_special=True)
        assert tuple(tokens) == prompt.tokens


@pytest.mark.parametrize("number", range(5))
def test_logits_and_greedy_tokens(context, golden, number):
    prompt = golden.prompts[number]
    tokens = np.array(prompt.tokens, dtype=np.int32)
    context.decode(tokens, seq_id=0, logits="all")
    rows = np.stack([context.logits(i) for i in range(len(tokens))])
    np.testing.assert_allclose(rows, prompt.logits, atol=1e-3, rtol=0)
    wanted = prompt.greedy[:200]
    assert greedy(context, rows[-1], len(wanted)) == wanted
    assert context.n_past(0) == len(tokens) + len(wanted)


def test_a_quantised_file_stays_near(load, open_context, golden, story_path):
    model = load(story_path.with_name("storyteller-q8_0.gguf"))
    context = open_context(model)
    prompt = golden.prompts[1]
    context.decode(np.array(prompt.tokens, dtype=np.int32), seq_id=0, logits="all")
    rows = np.stack([context.logits(i) for i in range(len(prompt.tokens))])
    assert np.abs(rows - prompt.logits).mean() < 0.2
    assert (rows.argmax(1) == prompt.logits.argmax(1)).mean() > 0.9


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"flash_attn": "on"},
        {"type_k": "f16", "type_v": "f16"},
        {"flash_attn": "on", "type_k": "q8_0", "type_v": "q8_0"},
        {"type_k": "q4_0"},
    ],
)
def test_another_split_moves_logits_within_the_tolerance(story, open_context, prompt, fields):
    context = open_context(story, **fields)
    context.decode(prompt, seq_id=0, logits="last")
    whole = context.logits(0).copy()
    for step in (1, 7, 33):
        context.clear()
        for start in range(0, len(prompt), step):
            context.decode(prompt[start : start + step], seq_id=0, logits="last")
        assert np.abs(context.logits(0) - whole).max() <= context.tolerance


def test_the_same_split_gives_the_same_bits(context, prompt):
    context.decode(prompt, seq_id=0, logits="last")
    first = context.logits(0).copy()
    context.clear()
    context.decode(prompt, seq_id=0, logits="last")
    assert (context.logits(0) == first).all()
