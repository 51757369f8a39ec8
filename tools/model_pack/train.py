"""Trains the storyteller on packed sequences of the corpus, in float32 and with a fixed seed."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from model_pack.corpus import Document
from model_pack.tokenizer import BOS, EOS, TURN_END, render

N_CTX = 1024
SEED = 20


@dataclass(frozen=True)
class Shape:
    """The sizes of a llama whose heads have 32 numbers, two query heads to a key head."""

    width: int
    n_layers: int
    n_ff: int

    @property
    def n_heads(self) -> int:
        return self.width // 32


STORYTELLER = Shape(width=128, n_layers=4, n_ff=320)
DRAFT = Shape(width=64, n_layers=1, n_ff=160)


@dataclass(frozen=True)
class Stage:
    """Some optimiser steps with one sequence length; ``share`` is its part of all tokens seen."""

    n_tokens: int
    n_sequences: int
    share: float


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to learn: short sequences first, then whole windows."""

    n_tokens_total: int
    peak_rate: float = 4e-3
    matrix_rate: float = 2e-2
    stages: tuple[Stage, ...] = (Stage(256, 16, 0.25), Stage(N_CTX, 4, 0.75))


def pack(documents: Iterable[Document], tokenizer: Tokenizer) -> NDArray[np.int32]:
    """All documents as one row of ids, each between BOS and EOS."""
    (eos,) = ids_of(tokenizer, EOS)
    ids: list[int] = []
    for document in documents:
        ids += [*tokenizer.encode(render(document)).ids, eos]
    return np.array(ids, dtype=np.int32)


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    """The ids of tokens that must exist."""
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[token] for token in tokens]


def new_model(tokenizer: Tokenizer, shape: Shape = STORYTELLER) -> LlamaForCausalLM:
    """A llama of that shape: the storyteller's has 0.8 million parameters, the draft's 0.1."""
    torch.manual_seed(SEED)
    bos, eos, eot = ids_of(tokenizer, BOS, EOS, TURN_END)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=shape.width,
        intermediate_size=shape.n_ff,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_heads // 2,
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
        bos_token_id=bos, eos_token_id=[eos, eot], pad_token_id=eos
    )
    return model


def _optimisers(model: LlamaForCausalLM, plan: Schedule) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings and norms."""
    inner = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    outer = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(inner, lr=plan.matrix_rate, weight_decay=0.01, momentum=0.95),
        torch.optim.AdamW(outer, lr=plan.peak_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def _rate(progress: float) -> float:
    """Warm-up over 3 % of the way, flat, then down to 1 % in a half cosine."""
    if progress < 0.03:
        return progress / 0.03
    if progress < 0.4:
        return 1.0
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (progress - 0.4) / 0.6))


def _batches(ids: NDArray[np.int32], plan: Schedule) -> Iterator[tuple[torch.Tensor, float]]:
    """Windows from random documents on; with each the share of the training done before it."""
    rng = np.random.default_rng(SEED)
    firsts = np.flatnonzero(ids[: -N_CTX - 1] == ids[0])
    seen = 0
    for stage in plan.stages:
        end = seen + int(plan.n_tokens_total * stage.share)
        while seen < end:
            starts = rng.choice(firsts, stage.n_sequences)
            rows = np.stack([ids[s : s + stage.n_tokens + 1] for s in starts])
            yield torch.from_numpy(rows.astype(np.int64)), seen / plan.n_tokens_total
            seen += stage.n_tokens * stage.n_sequences


def loss_of(model: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy, in nats per token."""
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def train(model: LlamaForCausalLM, ids: NDArray[np.int32], plan: Schedule) -> float:
    """Train in place; the mean loss of the last fifty steps."""
    optimisers = _optimisers(model, plan)
    bases = [o.param_groups[0]["lr"] for o in optimisers]
    losses: list[float] = []
    began = time.monotonic()
    model.train()
    for rows, progress in _batches(ids, plan):
        for optimiser, base in zip(optimisers, bases, strict=True):
            optimiser.param_groups[0]["lr"] = base * _rate(progress)
        losses.append(_step(model, rows, optimisers))
        if len(losses) % 50 == 0:
            spent = time.monotonic() - began
            print(f"{progress:6.1%} {np.mean(losses[-50:]):.4f} nats {spent:.0f} s", flush=True)
    return float(np.mean(losses[-50:]))


def _step(
    model: LlamaForCausalLM, rows: torch.Tensor, optimisers: list[torch.optim.Optimizer]
) -> float:
    loss = loss_of(model, rows)
    model.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimiser in optimisers:
        optimiser.step()
    return float(loss.item())


def held_out_loss(model: LlamaForCausalLM, ids: NDArray[np.int32], n_windows: int = 64) -> float:
    """Mean loss over whole windows, from documents on that were not trained on."""
    firsts = np.flatnonzero(ids[: -N_CTX - 1] == ids[0])[:n_windows]
    rows = np.stack([ids[first : first + N_CTX + 1] for first in firsts]).astype(np.int64)
    model.eval()
    with torch.inference_mode():
        return float(np.mean([loss_of(model, torch.from_numpy(row[None])).item() for row in rows]))


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write float32 weights and configuration for transformers."""
    model.eval().save_pretrained(folder, safe_serialization=True)
