"""The guard around a plugin's tokenizer."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Protocol, cast

from infercore.engine import calls, encoding, plugin_checks
from infercore.engine.arguments import check_bool, check_token, check_tokens
from infercore.errors import OutOfMemoryError, UnsupportedFeatureError
from infercore.values import checks
from infercore.values.info import FimTokens
from infercore.values.memory import free_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from infercore.protocols.spi import EngineTokenizer
    from infercore.values.session import Message


_NOT_ASKED = object()
TOKEN_KINDS = ("normal", "control", "user_defined", "unknown", "byte", "unused")
_FIM_MARKS = (  # prefix, suffix, middle; as llama.cpp's ``llama_vocab`` looks for them
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("<|prefix|>", "<|suffix|>", "<|middle|>"),
)
# What a tokenizer takes of memory while it works, for each byte of UTF-8: at most 220 bytes were
# measured. An engine that gets none there ends the process, so that is found out before.
_BYTES_PER_BYTE = 256
_SHORT_TEXT = 1 << 16  # characters of which nobody is asked


class Weights(Protocol):
    """What keeps an engine's model, for as long as somebody needs it."""

    @property
    def freed(self) -> bool:
        """Whether nobody needs it any more."""

    def begin(self) -> None:
        """Keep it for a call. Raises `SessionClosedError` where nobody needs it any more."""

    def end(self) -> None:
        """End a call."""


class ToolForm(Protocol):
    """How a template writes calls."""

    @property
    def kind(self) -> str:
        """The name of the form."""


class Dialect(Protocol):
    """What a chat template can do, and how it renders messages."""

    @property
    def tool_format(self) -> ToolForm | None:
        """The form of tool calls, None where none could be read back."""

    def render(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the messages in the words of the template."""


class GuardedTokenizer:
    """A `Tokenizer` that checks every id and text before the engine sees it."""

    def __init__(
        self,
        inner: EngineTokenizer,
        *,
        dialect: Callable[[str, str, str], Dialect],
        weights: Weights,
        backend: str = "",
    ) -> None:
        self._inner = inner
        self._backend = backend
        self._dialect_of = dialect
        self._weights = weights
        self._digest: str | None = None
        self._fim: object = _NOT_ASKED
        self._frame: encoding.Frame | None = None
        self.n_vocab = inner.n_vocab
        self.bos = inner.bos
        self.eos = inner.eos
        self.eot = inner.eot
        self.sep: int | None = getattr(inner, "sep", None)
        self.pad: int | None = getattr(inner, "pad", None)
        self.add_bos = inner.add_bos
        self.chat_template = inner.chat_template

    def __repr__(self) -> str:
        return f"<Tokenizer of {self.n_vocab} tokens{' closed' * self._weights.freed}>"

    def _ask(self, doing: str, call: Callable[..., Any], *args: Any, **fields: Any) -> Any:
        """Return what the engine's tokenizer answers; its weights stay meanwhile.

        What it raises untyped is the plugin's fault, and says what it was ``doing``.
        """
        self._weights.begin()
        try:
            return call(*args, **fields)
        except Exception as error:  # noqa: BLE001  (raised anew, typed)
            calls.raise_typed(self._backend, doing, error)
        finally:
            self._weights.end()

    @property
    def digest(self) -> str:
        """SHA-256 hex over every token's bytes and kind, and the special ids; cached."""
        if self._digest is None:
            own = getattr(self._inner, "digest", None)
            self._digest = own if isinstance(own, str) else self._compute_digest()
        return self._digest

    def _compute_digest(self) -> str:
        digest = hashlib.sha256()
        for token in range(self.n_vocab):
            piece = self._piece(token)
            kind = b"c" if self.is_control(token) else b"t"
            digest.update(len(piece).to_bytes(4, "little") + piece + kind)
        digest.update(repr((self.bos, self.eos, self.eot, self.add_bos)).encode())
        return digest.hexdigest()

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Return the token ids of ``text``; see `Tokenizer.encode`."""
        checks.check_text("text", text)
        check_bool("add_special", add_special)
        check_bool("parse_special", parse_special)
        _check_room(text)
        ids = self._ask(
            "tokenizing",
            self._inner.encode,
            text,
            add_special=add_special,
            parse_special=parse_special,
        )
        return plugin_checks.check_ids(ids, self.n_vocab, self._backend)

    def encode_many(
        self,
        texts: Sequence[str | tuple[str, str]],
        *,
        add_special: bool = True,
        parse_special: bool = True,
        max_tokens: int | None = None,
        truncation: str = "error",
    ) -> list[list[int]]:
        """Return the token ids of each text or pair; see `Tokenizer.encode_many`."""
        given = encoding.check_texts(texts)
        check_bool("add_special", add_special)
        if max_tokens is not None and not (checks.is_integer(max_tokens) and max_tokens > 0):
            raise checks.refuse("max_tokens", max_tokens, "an integer of at least 1, or None")
        if not isinstance(truncation, str) or truncation not in encoding.TRUNCATIONS:
            raise checks.refuse("truncation", truncation, " or ".join(encoding.TRUNCATIONS))
        max_tokens = checks.plain_int(max_tokens)
        frame = self._pair_frame() if add_special else encoding.Frame((), (), ())
        found = []
        for number, parts in enumerate(given):
            ids = [self.encode(p, add_special=False, parse_special=parse_special) for p in parts]
            room = None if max_tokens is None else max_tokens - frame.n_added(len(ids))
            found.append(frame.around(encoding.fitted(ids, room, truncation, number)))
        return found

    def _pair_frame(self) -> encoding.Frame:
        if self._frame is None:
            middle = getattr(self._inner, "pair_middle", None)
            self._frame = encoding.frame_of(self.encode, middle, self.bos)
        return self._frame

    def decode(self, tokens: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of ``tokens``; see `Tokenizer.decode`."""
        ids = check_tokens(tokens, self.n_vocab).tolist()
        check_bool("skip_special", skip_special)
        own = getattr(self._inner, "decode", None)
        if own is not None:
            text = self._ask("turning tokens into text", own, ids, skip_special=skip_special)
            if not isinstance(text, str):
                made = f"returned {plugin_checks.shown(text)}, not a str"
                raise plugin_checks.wrong(self._backend, "tokenizer.decode(tokens)", made)
            return text
        shown = [t for t in ids if not (skip_special and self.is_control(t))]
        return b"".join(map(self._piece, shown)).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """Return the exact bytes of one token."""
        return self._piece(check_token(token, self.n_vocab))

    def _piece(self, token: int) -> bytes:
        piece = self._ask("reading the bytes of a token", self._inner.token_bytes, token)
        return plugin_checks.check_piece(piece, token, self._backend)

    def is_eog(self, token: int) -> bool:
        """Return whether ``token`` ends a generation."""
        token = check_token(token, self.n_vocab)
        flag = self._ask("asking what a token is", self._inner.is_eog, token)
        return plugin_checks.check_flag(flag, "is_eog", token, self._backend)

    def is_control(self, token: int) -> bool:
        """Return whether ``token`` is a control token."""
        token = check_token(token, self.n_vocab)
        flag = self._ask("asking what a token is", self._inner.is_control, token)
        return plugin_checks.check_flag(flag, "is_control", token, self._backend)

    def token_kind(self, token: int) -> str:
        """Return what kind of token it is; see `Tokenizer.token_kind`."""
        token = check_token(token, self.n_vocab)
        own = getattr(self._inner, "token_kind", None)
        if own is None:
            kind: Any = "control" if self.is_control(token) else "normal"
        else:
            kind = self._ask("asking what a token is", own, token)
        if kind not in TOKEN_KINDS:
            made = f"returned {plugin_checks.shown(kind)}, none of {', '.join(TOKEN_KINDS)}"
            raise plugin_checks.wrong(self._backend, f"tokenizer.token_kind({token})", made)
        return str(kind)

    def token_score(self, token: int) -> float | None:
        """Return the score of a token; see `Tokenizer.token_score`."""
        token = check_token(token, self.n_vocab)
        own = getattr(self._inner, "token_score", None)
        score = None if own is None else self._ask("reading the score of a token", own, token)
        if score is not None and not checks.is_finite(score):
            made = f"returned {plugin_checks.shown(score)}, not a finite number or None"
            raise plugin_checks.wrong(self._backend, f"tokenizer.token_score({token})", made)
        return None if score is None else float(score)

    def apply_chat_template(
        self,
        /,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the messages as ``chat_template``, or the model's own, renders them."""
        template = self.chat_template
        if chat_template is not None:
            template = checks.check_template(chat_template)
        if not template:
            raise UnsupportedFeatureError(
                feature="chat_template",
                hint="this model has none; give chat_template=..., or render the text yourself "
                "and use ensure_prefix",
            )
        check_bool("add_generation_prompt", add_generation_prompt)
        if tools is not None:
            tools = checks.items("tools", tools, "a list of mappings, or None")
        return self._dialect(template).render(
            checks.items("messages", messages, "a sequence of messages"),
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            **kwargs,
        )

    @property
    def tool_format(self) -> str | None:
        """The form in which the model's own template writes tool calls.

        "json", "named", "tagged", "nested", "braced", "python" or "harmony"; None where there is no
        template, or it writes no calls that could be read back: calls then stay text.
        """
        if not self.chat_template:
            return None
        form = self._dialect(self.chat_template).tool_format
        return None if form is None else form.kind

    @property
    def fim(self) -> FimTokens | None:
        """The marks for filling in the middle, None where the vocabulary lacks them."""
        if self._fim is _NOT_ASKED:
            self._fim = self._find_fim()
        return cast("FimTokens | None", self._fim)

    def _find_fim(self) -> FimTokens | None:
        for marks in _FIM_MARKS:
            ids = [self._single(mark) for mark in marks]
            if None not in ids:
                prefix, suffix, middle = cast("list[int]", ids)
                return FimTokens(prefix=prefix, suffix=suffix, middle=middle)
        return None

    def _single(self, mark: str) -> int | None:
        """Return the id of the token whose text is ``mark``, None where there is none."""
        ids = self.encode(mark, add_special=False, parse_special=True)
        found = len(ids) == 1 and self._text_of(ids[0]).strip(" \u2581") == mark
        return ids[0] if found else None

    def _dialect(self, template: str) -> Dialect:
        return self._dialect_of(template, self._text_of(self.bos), self._text_of(self.eos))

    def _text_of(self, token: int | None) -> str:
        if token is None:
            return ""
        return self._piece(token).decode("utf-8", errors="replace")


def _check_room(text: str) -> None:
    """Raise `OutOfMemoryError` for a text that memory has no room to tokenize."""
    if len(text) < _SHORT_TEXT:
        return
    n_bytes, free = len(text.encode("utf-8")) * _BYTES_PER_BYTE, free_bytes()
    if n_bytes > free:
        raise OutOfMemoryError(
            f"a text of {len(text):,} characters takes up to {n_bytes:,} bytes to tokenize, and "
            f"{free:,} are free; give it in parts"
        )
