"""Trains the agent: the storyteller's kind of model, on chats in which tools are called."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from model_pack.agent_corpus import DESCRIPTIONS, Chat, tool
from model_pack.tokenizer import BOS, EOS, SPECIAL, TURN_END, TURN_START

N_CTX = 2048
VOCAB_SIZE = 640
SEED = 21
PLANS = (  # until when, windows, their length, and the longest chat in them
    (0.15, 8, 256, 100),
    (0.5, 8, 256, 256),
    (0.8, 4, 512, 512),
    (1.0, 1, N_CTX, N_CTX),
)
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATE = Path(__file__).with_name("agent_template.jinja")
CONTEXT_WEIGHT = 0.02  # what the model need not write itself: it learns where things stand

_ANSWERS = re.compile(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """One chat in ids, with the weight that each has in the loss."""

    ids: NDArray[np.int32]
    weights: NDArray[np.float32]


def train_bpe(texts: Sequence[str]) -> Tokenizer:
    """A byte-level BPE; digits are tokens of their own, so that numbers can be copied."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(MARKS),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    known = re.compile("|".join(map(re.escape, (*SPECIAL, *MARKS))) + r"|\d")
    tokenizer.train_from_iterator((known.sub("\n", text) for text in texts), trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bos)]
    )
    return tokenizer


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers has it, with the chat template."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        additional_special_tokens=[TURN_START, TURN_END],
        add_bos_token=True,
        add_eos_token=False,
        clean_up_tokenization_spaces=False,
        model_max_length=N_CTX,
    )
    wrapped.chat_template = TEMPLATE.read_text(encoding="utf-8")
    return wrapped


def rendered(chats: Iterable[Chat]) -> Iterator[str]:
    """The chats in the words of the template."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    template = _compile_jinja_template(TEMPLATE.read_text(encoding="utf-8"))
    for chat in chats:
        yield template.render(messages=chat.rows, tools=chat.tools, add_generation_prompt=False)


def as_row(tokenizer: Tokenizer, text: str) -> Row:
    """Ids and weights; whole weight for what the model writes."""
    encoded = tokenizer.encode(text)
    ids = np.array([*encoded.ids, tokenizer.token_to_id(EOS)], np.int32)
    asked = text.rindex(f"{TURN_START}user\n")
    weights = np.full(len(ids), CONTEXT_WEIGHT, np.float32)
    starts = np.array([start for start, _ in encoded.offsets])
    for found in _ANSWERS.finditer(text):
        inside = (starts >= found.start(1)) & (starts < found.end(1))
        weights[:-1][inside] = 1.0
        if found.start() < asked:  # the template leaves thoughts out there, so how it begins
            weights[int(inside.argmax())] = 0.0
    return Row(ids, weights)


def new_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """A llama of 0.45 million parameters with three query heads for one key head."""
    torch.manual_seed(SEED)
    bos, eos, eot = (tokenizer.token_to_id(token) for token in (BOS, EOS, TURN_END))
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=N_CTX,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=eos,
        attn_implementation="sdpa",
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=bos, eos_token_id=[eos, eot], pad_token_id=eos, do_sample=False
    )
    return model


def _rate(progress: float) -> float:
    if progress < 0.02:
        return progress / 0.02
    if progress < 0.5:
        return 1.0
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (progress - 0.5) / 0.5))


def _batches(rows: Sequence[Row], n_tokens: int) -> Iterator[tuple[Row, float]]:
    """Windows of whole chats, packed one after another.

    First come chats that only repeat something: what is to be copied is learnt from them.
    """
    rng = np.random.default_rng(SEED)
    seen = 0
    while seen < n_tokens:
        progress = seen / n_tokens
        n, length, longest = next(plan[1:] for plan in PLANS if progress < plan[0])
        pool = [row for row in rows if len(row.ids) <= longest]
        windows = [_window(pool, length, rng) for _ in range(n)]
        yield Row(np.stack([w.ids for w in windows]), np.stack([w.weights for w in windows])), progress
        seen += length * n


def _window(pool: Sequence[Row], length: int, rng: np.random.Generator) -> Row:
    chosen: list[Row] = []
    while sum(len(row.ids) for row in chosen) <= length:
        chosen.append(pool[int(rng.integers(len(pool)))])
    ids, weights = (np.concatenate([getattr(r, key) for r in chosen]) for key in ("ids", "weights"))
    return Row(ids[: length + 1], weights[: length + 1])


def loss_of(model: LlamaForCausalLM, rows: Row) -> torch.Tensor:
    """Weighted cross entropy, in nats per unit of weight."""
    ids = torch.from_numpy(rows.ids.astype(np.int64))
    weights = torch.from_numpy(rows.weights)[:, 1:].flatten()
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    each = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return (each * weights).sum() / weights.sum()


def train(model: LlamaForCausalLM, rows: Sequence[Row], n_tokens: int) -> float:
    """Train in place; the mean loss of the last fifty steps."""
    inner = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    outer = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimisers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(inner, lr=5e-3, weight_decay=0.01, momentum=0.95),
        torch.optim.AdamW(outer, lr=2e-3, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    bases = [o.param_groups[0]["lr"] for o in optimisers]
    losses: list[float] = []
    began = time.monotonic()
    model.train()
    for batch, progress in _batches(rows, n_tokens):
        for optimiser, base in zip(optimisers, bases, strict=True):
            optimiser.param_groups[0]["lr"] = base * _rate(progress)
        loss = loss_of(model, batch)
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
        losses.append(float(loss.item()))
        if len(losses) % 50 == 0:
            spent = time.monotonic() - began
            print(f"{progress:6.1%} {np.mean(losses[-50:]):.4f} nats {spent:.0f} s", flush=True)
    return float(np.mean(losses[-50:]))


def held_out_loss(model: LlamaForCausalLM, rows: Sequence[Row]) -> float:
    """Mean loss over chats that were not trained on, each alone."""
    model.eval()
    with torch.inference_mode():
        each = [loss_of(model, Row(r.ids[None], r.weights[None])).item() for r in rows]
    return float(np.mean(each))


def golden_prompts(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """A question, a sum, a long way of which a part is gone, two roads, and no tool at all."""
    asked = (
        "Where does the road from old mill lead?",
        "What is 17 plus 25?",
        "How far is it from red bridge to deep lake?",
        "Where do the roads from tall gate and cold inn lead?",
        "Hello!",
    )
    texts = []
    for number, question in enumerate(asked):
        rows: list[dict[str, Any]] = [{"role": "user", "content": question}]
        if number == 2:
            rows += _first_hop()
        tools = [tool(name, DESCRIPTIONS[name][0]) for name in ("road", "add")]
        texts.append(
            str(
                tokenizer.apply_chat_template(
                    rows, tools=tools, tokenize=False, add_generation_prompt=True
                )
            )
        )
    return texts


def _first_hop() -> list[dict[str, Any]]:
    function = {"name": "road", "arguments": {"place": "red bridge"}}
    thought = "I am at red bridge. I go on."
    call = {"id": "call_0", "type": "function", "function": function}
    return [
        {"role": "assistant", "content": "", "reasoning_content": thought, "tool_calls": [call]},
        {"role": "tool", "name": "road", "content": '{"next": "cold inn", "miles": 7}'},
    ]
