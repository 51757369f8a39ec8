"""Trains the encoder: a small BERT that puts texts of one scene near each other.

Two objectives at once, on pairs of passages of one document: masked language modelling, and
telling from the mean of the hidden states which two passages belong together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch.nn import functional
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from model_pack.corpus import Document

VOCAB_SIZE, N_CTX, SEED = 1024, 256, 21
N_WORDS = 40  # of a passage
PAD, UNK, CLS, SEP, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
MASKED_SHARE, TEMPERATURE = 0.15, 0.1
Pair = tuple[str, str]


def plain_text(document: Document) -> str:
    """The document without the marks of its turns."""
    if document.text:
        return document.text
    return " ".join(turn.content for turn in document.turns)


def train_wordpiece(documents: Iterable[Document]) -> Tokenizer:
    """A WordPiece tokenizer that lowers case and strips accents, as BERT's does."""
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNK))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = [PAD, UNK, CLS, SEP, MASK]
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(map(plain_text, documents), trainer)
    ids = [(token, tokenizer.token_to_id(token)) for token in (CLS, SEP)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{CLS} $A {SEP}", pair=f"{CLS} $A {SEP} $B:1 {SEP}:1", special_tokens=ids
    )
    return tokenizer


def new_model(tokenizer: Tokenizer) -> BertForMaskedLM:
    """A BERT of 0.2 million parameters; its GELU is the one that llama.cpp computes."""
    torch.manual_seed(SEED)
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=192,
        hidden_act="gelu_pytorch_tanh",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=N_CTX,
        pad_token_id=tokenizer.token_to_id(PAD),
        dtype="float32",
    )
    return BertForMaskedLM(config)


def _passages(text: str) -> list[str]:
    words = text.split()
    return [" ".join(words[i : i + N_WORDS]) for i in range(0, len(words), N_WORDS)]


def _pairs(documents: list[Document], n_pairs: int) -> Iterator[list[Pair]]:
    """Batches of pairs; of each document two passages, none of them twice in a batch."""
    rng = np.random.default_rng(SEED)
    passages = [p for p in map(_passages, map(plain_text, documents)) if len(p) > 1]
    while True:
        chosen = rng.choice(len(passages), n_pairs, replace=False)
        picked = [rng.choice(len(passages[i]), 2, replace=False) for i in chosen]
        yield [(passages[i][a], passages[i][b]) for i, (a, b) in zip(chosen, picked, strict=True)]


def _encode(tokenizer: Tokenizer, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [tokenizer.encode(text).ids[:N_CTX] for text in texts]
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    return ids, (ids != tokenizer.token_to_id(PAD)).long()


def mean_of(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mean of the hidden states that are no padding, of length 1."""
    weights = mask.unsqueeze(-1).float()
    return functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


def _loss(
    model: BertForMaskedLM, tokenizer: Tokenizer, pairs: list[Pair], rng: torch.Generator
) -> torch.Tensor:
    ids, mask = _encode(tokenizer, [text for pair in zip(*pairs, strict=True) for text in pair])
    hidden = model.bert(input_ids=ids, attention_mask=mask).last_hidden_state
    vectors = mean_of(hidden, mask)
    left, right = vectors[: len(pairs)], vectors[len(pairs) :]
    belongs = functional.cross_entropy(left @ right.T / TEMPERATURE, torch.arange(len(pairs)))
    hide = (torch.rand(ids.shape, generator=rng) < MASKED_SHARE) & (ids > 4)
    masked = ids.masked_fill(hide, tokenizer.token_to_id(MASK))
    logits = model(input_ids=masked, attention_mask=mask).logits
    return belongs + functional.cross_entropy(logits[hide], ids[hide])


def train(tokenizer: Tokenizer, documents: list[Document], n_steps: int) -> BertForMaskedLM:
    """Train a new model for so many batches of 24 pairs."""
    model = new_model(tokenizer).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=n_steps)
    rng = torch.Generator().manual_seed(SEED)
    for step, pairs in zip(range(n_steps), _pairs(documents, 24)):
        loss = _loss(model, tokenizer, pairs, rng)
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step % 50 == 0:
            print(f"{step:5d} {loss.item():.4f}", flush=True)
    return model.eval()


def save(model: BertForMaskedLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the encoder without its language-model head, its tokenizer and its pooling."""
    model.bert.save_pretrained(folder, safe_serialization=True)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNK,
        cls_token=CLS,
        sep_token=SEP,
        mask_token=MASK,
        model_max_length=N_CTX,
    )
    wrapped.save_pretrained(folder)
    _save_pooling(folder, model.config.hidden_size)


def _save_pooling(folder: Path, width: int) -> None:
    """Say in the files of sentence-transformers that the mean is the embedding."""
    names = ("Transformer", "Pooling")
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": "" if not i else f"{i}_{name}",
            "type": f"sentence_transformers.models.{name}",
        }
        for i, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(modules, indent=1) + "\n")
    pooling = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling, indent=1) + "\n")


