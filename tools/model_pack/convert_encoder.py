"""Runs llama.cpp's own converter on the encoder, whose tokenizer its list of known ones lacks.

Usage: ``python convert_encoder.py LLAMA_CPP_DIR CONVERTER_ARGUMENT...``. The name of the
pre-tokenizer is given from outside; WordPiece has one split only, so it changes nothing.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main(llama_cpp: Path, arguments: list[str]) -> None:
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    from conversion import base  # type: ignore[import-not-found,unused-ignore]

    base.TextModel.get_vocab_base_pre = lambda _self, _tokenizer: "bert-bge"
    sys.argv = ["convert_hf_to_gguf.py", *arguments]
    runpy.run_path(str(llama_cpp / "convert_hf_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
