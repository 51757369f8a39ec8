"""The tokenizer of a model that lives in another process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from infercore.values.info import FimTokens
    from infercore.values.session import Message

_PAGE = 1024
"""Tokens whose bytes are asked for at once, and kept."""


class IsolatedTokenizer:
    """A `Tokenizer` whose calls are answered by the process of its pool."""

    def __init__(self, facts: Mapping[str, Any], ask: Callable[..., Any]) -> None:
        self._ask = ask
        self.n_vocab: int = facts["n_vocab"]
        self.bos: int | None = facts["bos"]
        self.eos: int | None = facts["eos"]
        self.eot: int | None = facts["eot"]
        self.add_bos: bool = facts["add_bos"]
        self.chat_template: str | None = facts["chat_template"]
        self.digest: str = facts["digest"]
        self.tool_format: str | None = facts["tool_format"]
        self.fim: FimTokens | None = facts["fim"]
        self._bytes: dict[int, list[bytes]] = {}

    def _call(self, name: str, *args: Any, **fields: Any) -> Any:
        return self._ask("tokenizer", name, list(args), fields)

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Return the token ids of ``text``; see `Tokenizer.encode`."""
        found: list[int] = self._call(
            "encode", text, add_special=add_special, parse_special=parse_special
        )
        return found

    def decode(self, tokens: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of ``tokens``; see `Tokenizer.decode`."""
        return str(self._call("decode", tokens, skip_special=skip_special))

    def token_bytes(self, token: int) -> bytes:
        """Return the exact bytes of one token."""
        if not (type(token) is int and 0 <= token < self.n_vocab):
            return bytes(self._call("token_bytes", token))  # it says what is wrong
        page, place = divmod(token, _PAGE)
        if page not in self._bytes:  # many are asked for, one by one, where there are logprobs
            start = page * _PAGE
            found = self._ask("token_bytes", start, min(start + _PAGE, self.n_vocab))
            self._bytes[page] = found
        return self._bytes[page][place]

    def is_eog(self, token: int) -> bool:
        """Return whether ``token`` ends a generation."""
        return bool(self._call("is_eog", token))

    def is_control(self, token: int) -> bool:
        """Return whether ``token`` is a control token."""
        return bool(self._call("is_control", token))

    def apply_chat_template(
        self, /, messages: Sequence[Message | Mapping[str, Any]], **fields: Any
    ) -> str:
        """Return the messages as the template renders them; see `Tokenizer.apply_chat_template`."""
        return str(self._call("apply_chat_template", messages, **fields))
