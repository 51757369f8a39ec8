"""Trains the byte-level BPE tokenizer and wraps it with its special tokens and chat template."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from model_pack.corpus import Document

VOCAB_SIZE = 1024
BOS, EOS, TURN_START, TURN_END = "<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (BOS, EOS, TURN_START, TURN_END)

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def _training_text(documents: Iterable[Document]) -> Iterator[str]:
    """The corpus without its rarest characters, so that those stay several byte tokens each."""
    for document in documents:
        for text in (document.text, *(turn.content for turn in document.turns)):
            yield "".join(char for char in text if ord(char) < 0x2000)


def train_bpe(documents: Iterable[Document]) -> Tokenizer:
    """A byte-level BPE with the GPT-2 split; all bytes are tokens, so any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(documents), trainer)
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bos)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, n_ctx: int) -> None:
    """Write the tokenizer as transformers reads it."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        additional_special_tokens=[TURN_START, TURN_END],
        add_bos_token=True,
        add_eos_token=False,
        clean_up_tokenization_spaces=False,
        model_max_length=n_ctx,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)


def render(document: Document) -> str:
    """The document as training text, without BOS and EOS; chats as the template writes them."""
    turns = (f"{TURN_START}{t.role}\n{t.content}{TURN_END}\n" for t in document.turns)
    return document.text or "".join(turns)
