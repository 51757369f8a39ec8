"""Runs llama.cpp's own converter on our tokenizer, which its list of known tokenizers lacks.

Usage: ``python convert_gguf.py LLAMA_CPP_DIR CONVERTER_ARGUMENT...``. Two things are added from
outside, the vendored files stay as they are: the pre-tokenizer's name ("gpt-2", whose split ours is
trained with), and the end-of-turn token, which the converter writes for some model families only.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

PRE_TOKENIZER = "gpt-2"
TURN_END = "<|im_end|>"


def _name_pre_tokenizer(self: Any, tokenizer: Any) -> str:
    return PRE_TOKENIZER


def _add_turn_end(special_vocab: type[Any]) -> None:
    """Let every set of special tokens that is written name the end of a turn too."""
    add_to_gguf = special_vocab.add_to_gguf

    def add_with_turn_end(self: Any, writer: Any, quiet: bool = False) -> None:
        add_to_gguf(self, writer, quiet)
        key = "tokenizer.ggml.tokens"
        tokens = next(part[key].value for part in writer.kv_data if key in part)
        writer.add_eot_token_id([str(token) for token in tokens].index(TURN_END))

    special_vocab.add_to_gguf = add_with_turn_end


def main(llama_cpp: Path, arguments: list[str]) -> None:
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    import gguf  # type: ignore[import-untyped,import-not-found,unused-ignore]
    from conversion import base  # type: ignore[import-not-found,unused-ignore]

    base.TextModel.get_vocab_base_pre = _name_pre_tokenizer
    _add_turn_end(gguf.SpecialVocab)
    sys.argv = ["convert_hf_to_gguf.py", *arguments]
    runpy.run_path(str(llama_cpp / "convert_hf_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
