"""Compares llama.cpp and OpenVINO with the golden outputs of the model pack.

    python tools/check_model_pack.py [--model NAME] [llamacpp] [llamacpp-q8_0] [openvino]

Run it where ``infercore-models``, ``tokenizers`` and the engines named are installed, OpenVINO with
``openvino-tokenizers``. It prints, for each engine, the largest difference of a logit, how many
greedy tokens differ, and how many odd strings its tokenizer splits differently.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

import infercore_models

ODD_STRINGS = (
    "", " ", "  ", "\n", "\n\n", "\t", " \n ", "a", " a", "a ", "  a  b   c    ", "\r\n", "\u00a0x",
    "\u3000x", "Hello, world!", "don't we'll I'm you've they're he'd it's DON'T", "'s 's", "'",
    "1234567890", "12 345.67", "x1y2z3", "foo_bar(baz) { return 1; }", "<b>&amp;</b>", "\x00",
    "a\x00b", "\x7f\x80\x9f", "café", "cafe\u0301", "Zoë Jürgen André", "ÄÖÜß", "Привет, мир",
    "שלום", "مرحبا", "山", "龍 🐉", "山龍日本語テスト", "한국어", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪",
    "e\u0301\u0323", "\ufeffbom", "\u200b", "²³½", "Ⅷ", "٣", "ﬁ", "�", "<|endoftext|>",
    "<|im_start|>user\nHi<|im_end|>\n", "<|startoftext|>x", "<|im_start", "|>", " <|im_end|> x",
    "<|im_end|><|im_end|>", "Once upon a time", "the the the", "UPPER lower Title", "a" * 300,
    "-" * 77, "?!...,;:", "\u2028", "\U0001d4b3", "\U0010ffff",
)  # fmt: skip


class Engine(Protocol):
    """**Protocol:** what is compared."""

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Start anew; logits of every position."""

    def step(self, token: int) -> NDArray[np.float32]:
        """Append one token; its logits."""

    def encode(self, text: str) -> list[int]:
        """Ids with BOS, special tokens recognised."""


class LlamaCpp:
    def __init__(self, name: str, form: str = "gguf-f32") -> None:
        import llama_cpp

        path = str(infercore_models.path(name, form))
        self.llama: Any = llama_cpp.Llama(
            path, n_ctx=0, logits_all=True, flash_attn=False, type_k=0, type_v=0, verbose=False
        )

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        self.llama.reset()
        self.llama.eval(tokens)
        return np.array(self.llama.scores[: len(tokens)])

    def step(self, token: int) -> NDArray[np.float32]:
        self.llama.eval([token])
        return np.array(self.llama.scores[self.llama.n_tokens - 1])

    def encode(self, text: str) -> list[int]:
        return list(self.llama.tokenize(text.encode(), add_bos=True, special=True))


class OpenVino:
    def __init__(self, name: str) -> None:
        import openvino_tokenizers  # noqa: F401  # registers the operations of tokenizer graphs

        import openvino

        folder = infercore_models.path(name, "openvino")
        plain = {
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
        }
        core = openvino.Core()
        self.request: Any = core.compile_model(
            folder / "openvino_model.xml", "CPU", plain
        ).create_infer_request()
        self.n_past = 0
        self.tokenizer: Any = core.compile_model(folder / "openvino_tokenizer.xml", "CPU")

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        self.request.reset_state()
        self.n_past = 0
        return self._append(tokens)

    def step(self, token: int) -> NDArray[np.float32]:
        row: NDArray[np.float32] = self._append([token])[-1]
        return row

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer([text])["input_ids"][0].tolist()
        return ids

    def _append(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        end = self.n_past + len(tokens)
        inputs = {
            "input_ids": np.array([tokens], np.int64),
            "attention_mask": np.ones((1, end), np.int64),
            "position_ids": np.arange(self.n_past, end, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        self.n_past = end
        return np.array(self.request.infer(inputs)["logits"][0])


def compare(engine: Engine, name: str) -> dict[str, float]:
    """Numbers that should all be near or at zero."""
    worst, wrong = 0.0, 0
    for prompt in infercore_models.golden(name).prompts:
        logits = engine.logits(prompt.tokens)
        worst = max(worst, float(np.abs(logits - prompt.logits).max()))
        for token in prompt.greedy:
            wrong += int(logits[-1].argmax()) != token
            logits = engine.step(token)[None]
    reference = Tokenizer.from_file(str(infercore_models.path(name, "hf") / "tokenizer.json"))
    other = [text for text in ODD_STRINGS if engine.encode(text) != reference.encode(text).ids]
    return {"largest_difference": worst, "other_tokens": wrong, "other_splits": len(other)}


ENGINES: dict[str, Callable[[str], Engine]] = {
    "llamacpp": LlamaCpp,
    "llamacpp-q8_0": lambda name: LlamaCpp(name, "gguf-q8_0"),
    "openvino": OpenVino,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engines", nargs="*", choices=[*ENGINES, []])
    parser.add_argument("--model", default="storyteller", help="a model of the pack with golden logits")
    given = parser.parse_args()
    for name in given.engines or ENGINES:
        print(name, compare(ENGINES[name](given.model), given.model))


if __name__ == "__main__":
    main()
