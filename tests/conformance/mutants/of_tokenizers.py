"""Wrong tokenizers."""

from __future__ import annotations

import secrets
import time
from typing import Any

from conformance.mutants import around, breaks, instead, result
from infercore.engine.tokenizer import GuardedTokenizer
from infercore.errors import InvalidInputError, InvalidTokenError
from infercore.testing.reference_tokenizer import ReferenceTokenizer
from infercore.testing.toy import EOS, ToyTokenizer


@breaks("TOK-1", "TOK-3")
def blanks_at_the_end_are_lost(m: Any) -> None:
    around(m, ToyTokenizer, "encode", lambda old, self, text, **k: old(self, text.rstrip(), **k))


@breaks("TOK-2")
def ids_come_as_a_tuple(m: Any) -> None:
    result(m, GuardedTokenizer, "encode", tuple)


@breaks("TOK-3", base="reference")
def bytes_that_are_no_text_are_left_out(m: Any) -> None:
    result(m, ReferenceTokenizer, "decode", lambda text: text.replace("\ufffd", ""))


@breaks("TOK-3", "STREAM-2", "SEAM-8")
def the_last_byte_of_a_character_is_lost(m: Any) -> None:
    def token_bytes(old: Any, self: Any, token: int) -> bytes:
        data: bytes = old(self, token)
        return data[:-1] if data == "é".encode() else data

    around(m, ToyTokenizer, "token_bytes", token_bytes)


@breaks("TOK-4", "TOK-10", "SEAM-6")
def a_beginning_is_always_added(m: Any) -> None:
    def encode(old: Any, self: Any, text: str, *, add_special: bool, parse_special: bool) -> Any:
        return old(self, text, add_special=True, parse_special=parse_special)

    around(m, ToyTokenizer, "encode", encode)


@breaks("TOK-5", "SEAM-9")
def control_tokens_are_always_parsed(m: Any) -> None:
    def encode(old: Any, self: Any, text: str, *, add_special: bool, parse_special: bool) -> Any:
        return old(self, text, add_special=add_special, parse_special=True)

    around(m, ToyTokenizer, "encode", encode)


@breaks("TOK-6")
def an_unknown_id_is_no_control_token(m: Any) -> None:
    instead(m, GuardedTokenizer, "is_control", InvalidTokenError, lambda _: False)


@breaks("TOK-7")
def what_is_no_text_becomes_one(m: Any) -> None:
    instead(m, GuardedTokenizer, "encode", InvalidInputError, lambda _: [])


@breaks("TOK-8")
def the_end_of_a_turn_ends_nothing(m: Any) -> None:
    m.setattr(ToyTokenizer, "is_eog", lambda _, token: token == EOS)


@breaks("TOK-9")
def skip_special_is_ignored(m: Any) -> None:
    def decode(old: Any, self: Any, tokens: Any, *, skip_special: bool = False) -> Any:
        del skip_special
        return old(self, tokens)

    around(m, GuardedTokenizer, "decode", decode)


@breaks("TOK-11")
def ids_pass_through_one_buffer(m: Any) -> None:
    shared: list[Any] = [None]

    def encode(old: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        shared[0] = old(self, *args, **kwargs)
        time.sleep(0.001)
        return shared[0]

    around(m, ToyTokenizer, "encode", encode)


@breaks("TOK-12")
def the_first_message_is_left_out(m: Any) -> None:
    def apply(old: Any, self: Any, messages: Any, **kwargs: Any) -> Any:
        return old(self, messages[1:] or messages, **kwargs)

    around(m, GuardedTokenizer, "apply_chat_template", apply)


@breaks("TOK-13")
def malformed_messages_are_no_messages(m: Any) -> None:
    instead(m, GuardedTokenizer, "apply_chat_template", InvalidInputError, lambda _: "")


@breaks("TOK-14", "REUSE-11")
def a_digest_of_this_object(m: Any) -> None:
    m.setattr(GuardedTokenizer, "digest", property(lambda _: secrets.token_hex(32)))


@breaks("TOK-19")
def every_token_is_text(m: Any) -> None:
    m.setattr(ToyTokenizer, "token_kind", lambda *_: "normal", raising=False)


@breaks("TOK-19")
def a_pair_is_joined_by_text(m: Any) -> None:
    m.setattr(ToyTokenizer, "pair_middle", [65, 66], raising=False)


@breaks("TOK-20", base="reference")
def one_control_token_at_most_ends_a_text(m: Any) -> None:
    def encode(old: Any, self: Any, text: str, **options: Any) -> list[int]:
        ids = old(self, text, **options)
        ends = ids[-2:] if len(ids) > 2 else []
        return [*ids[:-2], ids[-1]] if ends and all(map(self.is_control, ends)) else ids

    around(m, ReferenceTokenizer, "encode", encode)


@breaks("TOK-20", base="reference")
def one_token_at_most_parts_a_pair(m: Any) -> None:
    around(m, ReferenceTokenizer, "_between", lambda old, self: old(self)[:1])
