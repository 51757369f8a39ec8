"""The exact bytes of a token, from the way its vocabulary writes them down."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"
_MARKED = re.compile(f"{_SPACE_MARK}|Metaspace")


def byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Printable characters of Latin-1 stand for themselves; the other bytes are numbered from
    U+0100 on. Source: the byte encoder of GPT-2.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [*range(0x21), *range(0x7F, 0xA1), 0xAD]
    alphabet = {chr(byte): byte for byte in plain}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


def piece_reader(description: Mapping[str, Any]) -> Callable[[str], bytes]:
    """Return what turns the text of a token into its bytes; ``description`` is a tokenizer.json."""
    kinds = str([description.get(name) for name in ("decoder", "pre_tokenizer")])
    if "ByteLevel" in kinds:
        return _byte_level(byte_alphabet())
    model = description.get("model", {})
    if _MARKED.search(kinds) or model.get("byte_fallback"):
        return _sentencepiece
    if model.get("type") == "WordPiece":
        return _word_piece(str(model.get("continuing_subword_prefix", "##")))
    return str.encode


def _byte_level(alphabet: Mapping[str, int]) -> Callable[[str], bytes]:
    def read(piece: str) -> bytes:
        try:
            return bytes(alphabet[character] for character in piece)
        except KeyError:
            return piece.encode()

    return read


def _word_piece(continuing: str) -> Callable[[str], bytes]:
    """Pieces go on with the word before them, or begin one, which a space sets apart."""

    def read(piece: str) -> bytes:
        if continuing and piece.startswith(continuing):
            return piece.removeprefix(continuing).encode()
        return b" " + piece.encode()

    return read


def _sentencepiece(piece: str) -> bytes:
    byte = BYTE_TOKEN.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(_SPACE_MARK, " ").encode()
