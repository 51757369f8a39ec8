"""The tokenizer of an exported model, read from its tokenizer.json."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from infercore import ModelFormatError
from infercore_openvino.files import read_text
from infercore_openvino.pieces import BYTE_TOKEN, piece_reader

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infercore_openvino.files import ModelFiles

# Names that end a turn or a text, the end of a turn first. Source: the names that llama.cpp
# looks for in a vocabulary.
_END_OF_TURN = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end_of_turn|>",
    "<|eom_id|>",
    "<EOT>",
)
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
_PROBE = "a"


class JsonTokenizer:
    """An `EngineTokenizer` over the `tokenizers` library.

    Whether control tokens are read in a text is a switch of the whole tokenizer there; so there
    are two of them, and threads do not meet.
    """

    def __init__(self, files: ModelFiles, n_vocab: int, path: str) -> None:
        text = _description(files, path)
        self.n_vocab = n_vocab
        self._parsing = _load(text, files.tokenizer_json, path)
        self._plain = _load(text, files.tokenizer_json, path)
        self._plain.encode_special_tokens = True
        description = json.loads(text)
        self._added = {t["id"]: t for t in description.get("added_tokens") or ()}
        self._unknown = _unknown(description["model"], self._parsing)
        self._read_piece = piece_reader(description)
        vocabulary = description["model"].get("vocab")
        self._scores = vocabulary if description["model"].get("type") == "Unigram" else ()
        self._named_unknown = description["model"].get(
            "unk_token", description["model"].get("unk_id")
        )
        self._set_special_ids(files)
        for token in (self.bos, self.eos):
            if token is not None and not 0 <= token < n_vocab:
                raise ModelFormatError(
                    f"the files of {path} begin or end texts with token {token}, but the "
                    f"vocabulary has the ids 0 to {n_vocab - 1}",
                    path=path,
                )
        self._prefix, self._suffix = self._frame(files.tokenizer)
        self.pair_middle = self._between()
        self.sep, self.pad = self._named("sep", files), self._named("pad", files)
        self.add_bos = self.bos is not None and self.bos in self._prefix
        self.chat_template = _chat_template(files)

    # -- text to ids ---------------------------------------------------------------------------

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return the ids of ``text``."""
        tokenizer = self._parsing if parse_special else self._plain
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return [*self._prefix, *ids, *self._suffix] if add_special else ids

    def _frame(self, config: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        """Return what is put before and after a text: the template, as the config overrides it."""
        bare = self._parsing.encode(_PROBE, add_special_tokens=False).ids
        self._adds_space = b"".join(map(self.token_bytes, bare)).startswith(b" ")
        framed = self._parsing.encode(_PROBE).ids
        at = next(i for i in range(len(framed)) if framed[i : i + len(bare)] == bare)
        prefix, suffix = framed[:at], framed[at + len(bare) :]
        return (
            self._overridden(prefix, self.bos, config.get("add_bos_token")),
            self._overridden(suffix, self.eos, config.get("add_eos_token")),
        )

    @staticmethod
    def _overridden(ids: list[int], token: int | None, asked: object) -> list[int]:
        if token is None or not isinstance(asked, bool) or asked == (token in ids):
            return ids
        return [token, *ids] if asked else [i for i in ids if i != token]

    def _between(self) -> list[int]:
        """Return what stands between the texts of a pair."""
        bare = self._parsing.encode(_PROBE, add_special_tokens=False).ids
        pair = self._parsing.encode(_PROBE, _PROBE).ids
        n = len(bare)
        places = [i for i in range(len(pair)) if pair[i : i + n] == bare]
        return pair[places[0] + n : places[-1]] if len(places) > 1 else []

    # -- ids to text ---------------------------------------------------------------------------

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token; of an id that the vocabulary leaves out, none."""
        added = self._added.get(token)
        if added is not None:
            return str(added["content"]).encode()
        piece = self._parsing.id_to_token(token)
        return b"" if piece is None else self._read_piece(piece)

    def decode(self, tokens: Sequence[int], *, skip_special: bool) -> str:
        """Return the text of ``tokens`` without the spaces that `encode` adds.

        Some vocabularies add one at the start and after each token that splits the text.
        """
        pieces = []
        at_start = self._adds_space
        for token in tokens:
            piece = self.token_bytes(token)
            if token in self._added:
                at_start = self._adds_space and token != self._unknown
                if skip_special and self.is_control(token):
                    continue
            elif at_start:
                piece = piece.removeprefix(b" ")
                at_start = False
            pieces.append(piece)
        return b"".join(pieces).decode("utf-8", "replace")

    # -- kinds ---------------------------------------------------------------------------------

    def is_eog(self, token: int) -> bool:
        """Return whether ``token`` ends a turn or a text."""
        return token in self._eog

    def is_control(self, token: int) -> bool:
        """Return whether ``token`` is no text."""
        added = self._added.get(token)
        return added is not None and bool(added["special"])

    def token_kind(self, token: int) -> str:
        """Return the kind of a token."""
        added, piece = self._added.get(token), self._parsing.id_to_token(token)
        if added is not None and piece != self._named_unknown:
            return "control" if added["special"] else "user_defined"
        if piece is None:
            return "unused"
        if self._named_unknown in (piece, token):
            return "unknown"
        return "byte" if BYTE_TOKEN.fullmatch(piece) else "normal"

    def token_score(self, token: int) -> float | None:
        """Return the log-probability of a token of a Unigram vocabulary."""
        return float(self._scores[token][1]) if token < len(self._scores) else None

    def _named(self, kind: str, files: ModelFiles) -> int | None:
        """Return the id of the token that tokenizer_config.json names for ``kind``."""
        named = files.tokenizer.get(f"{kind}_token")
        name = named.get("content") if isinstance(named, dict) else named
        token = self._parsing.token_to_id(name) if isinstance(name, str) else None
        return None if token is None else int(token)

    def _set_special_ids(self, files: ModelFiles) -> None:
        self.bos, self.eos = self._special("bos", files), self._special("eos", files)
        if not files.has_cache:  # encoders have other names for the tokens around a text
            self.bos = self._special("cls", files) if self.bos is None else self.bos
            self.eos = self._special("sep", files) if self.eos is None else self.eos
        named = [self._control(name) for name in _END_OF_TURN]
        self.eot = next((token for token in named if token is not None), None)
        self._eog = {
            token
            for token in (
                self.eos,
                *named,
                *map(self._control, _END_OF_TEXT),
                *_ids(files.generation.get("eos_token_id")),
                *_ids(files.config.get("eos_token_id")),
            )
            if token is not None
        }

    def _special(self, kind: str, files: ModelFiles) -> int | None:
        """The id that tokenizer_config.json names, else that of config.json and its sibling."""
        token = self._named(kind, files)
        if token is not None:
            return token
        configs = (files.config, files.generation)
        listed = [i for config in configs for i in _ids(config.get(f"{kind}_token_id"))]
        return listed[0] if listed else None

    def _control(self, name: str) -> int | None:
        token = self._parsing.token_to_id(name)
        return int(token) if token is not None and self.is_control(token) else None


def _unknown(model: Mapping[str, Any], tokenizer: Any) -> int | None:
    """Return the token that stands for characters outside the vocabulary: it splits no text."""
    if model.get("byte_fallback"):
        return None
    named = model.get("unk_token")
    found = tokenizer.token_to_id(named) if isinstance(named, str) else model.get("unk_id")
    return found if isinstance(found, int) else None


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [i for i in values if isinstance(i, int)]


def _description(files: ModelFiles, path: str) -> str:
    text = read_text(files.folder, os.path.basename(files.tokenizer_json))
    if text is None:
        raise ModelFormatError(
            f"{files.tokenizer_json} is missing; copy it from the model that was exported, "
            "or save it with AutoTokenizer.save_pretrained",
            path=path,
        )
    return text


def _load(text: str, name: str, path: str) -> Any:
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception
        raise ModelFormatError(
            f"{name} cannot be read: {error}; export or copy it again", path=path
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _chat_template(files: ModelFiles) -> str | None:
    text = read_text(files.folder, "chat_template.jinja")
    if text is not None:
        return text
    found = files.tokenizer.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found}
        found = named.get("default")
    return found if isinstance(found, str) else None
