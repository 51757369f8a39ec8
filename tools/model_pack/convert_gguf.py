"""Runs llama.cpp's own converter on our tokenizer, which its list of known tokenizers lacks.

Usage: ``python convert_gguf.py LLAMA_CPP_DIR CONVERTER_ARGUMENT...``. Three things are added from
outside, the vendored files stay as they are: the pre-tokenizer's name ("gpt-2", whose split ours is
trained with), the end-of-turn token, which the converter writes for some model families only, and
a recommended temperature of 0 where the model's files say that nothing is to be sampled.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

PRE_TOKENIZER = "gpt-2"
TURN_END = "<|im_end|>"


def _name_pre_tokenizer(self: Any, tokenizer: Any) -> str:
    return PRE_TOKENIZER


def _is_greedy(model: Path) -> bool:
    config: dict[str, Any] = json.loads((model / "generation_config.json").read_text("utf-8"))
    return config.get("do_sample") is False


def _add_keys(special_vocab: type[Any], *, greedy: bool) -> None:
    """Let every set of special tokens that is written name the end of a turn, and the sampling."""
    add_to_gguf = special_vocab.add_to_gguf

    def add_with_more(self: Any, writer: Any, quiet: bool = False) -> None:
        add_to_gguf(self, writer, quiet)
        key = "tokenizer.ggml.tokens"
        tokens = next(part[key].value for part in writer.kv_data if key in part)
        writer.add_eot_token_id([str(token) for token in tokens].index(TURN_END))
        if greedy:
            writer.add_float32("general.sampling.temp", 0.0)

    special_vocab.add_to_gguf = add_with_more


def main(llama_cpp: Path, arguments: list[str]) -> None:
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    import gguf  # type: ignore[import-untyped,import-not-found,unused-ignore]
    from conversion import base  # type: ignore[import-not-found,unused-ignore]

    base.TextModel.get_vocab_base_pre = _name_pre_tokenizer
    _add_keys(gguf.SpecialVocab, greedy=_is_greedy(Path(arguments[0])))
    sys.argv = ["convert_hf_to_gguf.py", *arguments]
    runpy.run_path(str(llama_cpp / "convert_hf_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
