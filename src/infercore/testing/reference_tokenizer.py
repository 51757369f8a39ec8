"""The tokenizer of a Hugging Face directory, through the ``tokenizers`` package."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from infercore.errors import BackendUnavailableError, ModelFormatError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")


_KINDS = ("BPE", "WordPiece")


class ReferenceTokenizer:
    """An `EngineTokenizer` over ``tokenizer.json``: byte-level BPE, or WordPiece of an encoder."""

    def __init__(self, folder: str, n_vocab: int, config: Mapping[str, Any]) -> None:
        text = _read(folder, "tokenizer.json")
        self._parsing = _load(text, folder)
        self._plain = _load(text, folder)
        self._plain.encode_special_tokens = True
        self._vocabulary = json.loads(text)
        kind = self._vocabulary["model"].get("type", "BPE")
        if kind not in _KINDS:
            raise ModelFormatError(
                f"{folder}: a vocabulary of kind {kind!r} is not known here; give one of {_KINDS}",
                path=folder,
            )
        self._of_words = kind == "WordPiece"
        steps = [self._vocabulary.get(name) for name in ("decoder", "pre_tokenizer")]
        if kind == "BPE" and "ByteLevel" not in json.dumps(steps):
            raise ModelFormatError(
                f"{folder}: pieces that are not byte-level are not known here", path=folder
            )
        added = self._vocabulary.get("added_tokens", ())
        self._added: dict[int, str] = {entry["id"]: entry["content"] for entry in added}
        special = {entry["id"] for entry in added if entry["special"]}
        self._control = {i: text for i, text in self._added.items() if i in special}
        self._alphabet = byte_alphabet()
        self.generation: Mapping[str, Any] = json_object(folder, "generation_config.json")
        named = (said.get("eos_token_id") for said in (self.generation, config))
        eos = next((token for token in named if token is not None), None)
        eog = eos if isinstance(eos, list) else [eos]
        self.n_vocab = n_vocab
        self.bos: int | None = config.get("bos_token_id")
        for token in (self.bos, *eog):
            if token is not None and not (isinstance(token, int) and 0 <= token < n_vocab):
                raise ModelFormatError(f"{folder} names token {token!r}, of {n_vocab}", path=folder)
        self.eos: int | None = eog[0]
        self.eot = self._end_of_turn()
        self.add_bos = self.bos in self._parsing.encode("").ids
        self.pair_middle = self._between()
        self.chat_template = self._template(folder)
        self._eog = {*eog, self.eot}

    def _end_of_turn(self) -> int | None:
        by_text = {text: token for token, text in self._control.items()}
        return next((by_text[text] for text in _END_OF_TURN if text in by_text), None)

    @staticmethod
    def _template(folder: str) -> str | None:
        text = _read(folder, "chat_template.jinja", "")
        found = json_object(folder, "tokenizer_config.json").get("chat_template")
        if isinstance(found, list):  # several, by name
            found = {each.get("name"): each.get("template") for each in found}.get("default")
        return text or found

    def _between(self) -> list[int]:
        """Return what stands between the texts of a pair."""
        pair = self._parsing.encode("a", "a")
        texts = pair.sequence_ids
        if not {0, 1} <= {*texts}:
            return []
        inside = slice(texts.index(0), texts.index(1))
        return [i for i, text in zip(pair.ids[inside], texts[inside], strict=True) if text is None]

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> Sequence[int]:
        """Return the ids of ``text``."""
        tokenizer = self._parsing if parse_special else self._plain
        ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special).ids
        return ids

    def token_bytes(self, token: int) -> bytes:
        """Return the exact bytes of one token; for an added token, those of its text."""
        if token in self._added:
            return self._added[token].encode()
        piece = self._parsing.id_to_token(token)
        if piece is None:  # a place in the matrix that the vocabulary leaves free
            return b""
        if self._of_words:
            return _word_piece(piece)
        if not self._alphabet.keys() >= set(piece):
            return str(piece).encode()
        return bytes(self._alphabet[character] for character in piece)

    def decode(self, tokens: Sequence[int], *, skip_special: bool) -> str:
        """Return the text of ``tokens``, in which no space is before the first word."""
        shown = [t for t in tokens if not (skip_special and self.is_control(t))]
        text = b"".join(map(self.token_bytes, shown)).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._of_words else text

    def is_eog(self, token: int) -> bool:
        """Return whether ``token`` ends a generation."""
        return token in self._eog

    def is_control(self, token: int) -> bool:
        """Return whether ``token`` is a control token."""
        return token in self._control


def _read(folder: str, name: str, default: str | None = None) -> str:
    path = os.path.join(folder, name)
    if default is not None and not os.path.exists(path):
        return default
    with open(path, "rb") as file:
        return file.read().decode()


def json_object(folder: str, name: str, default: str | None = "{}") -> dict[str, Any]:
    """Return the JSON object in a file, or in ``default`` where there is none.

    Raises `ModelFormatError` for anything else.
    """
    where = os.path.join(folder, name)
    try:
        found = json.loads(_read(folder, name, default))
    except (OSError, ValueError) as error:
        raise ModelFormatError(f"{where} cannot be read: {error}", path=folder) from error
    if not isinstance(found, dict):
        raise ModelFormatError(f"{where} is not a JSON object", path=folder)
    return found


def _load(text: str, folder: str) -> Any:
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415  (needed by this backend alone)
    except ImportError as error:
        raise BackendUnavailableError(
            "the reference backend needs the tokenizers package; run: pip install tokenizers",
            backend="reference",
            reason="tokenizers is not installed",
        ) from error
    try:
        found = Tokenizer.from_str(text)
    except Exception as error:
        raise ModelFormatError(
            f"{folder}: tokenizer.json cannot be read: {error}", path=folder
        ) from error
    found.no_truncation()
    found.no_padding()
    return found


def _word_piece(piece: str) -> bytes:
    """A piece goes on with the word before it, or begins one, which a space sets apart."""
    return piece[2:].encode() if piece.startswith("##") else b" " + piece.encode()


def byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Printable bytes stand for themselves, the others for characters from U+0100 on, in order.
    Source: ``bytes_to_unicode`` of OpenAI's GPT-2.
    """
    others = [*range(0x21), *range(0x7F, 0xA1), 0xAD]
    alphabet = {chr(byte): byte for byte in bytes(range(0x100))}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet
