"""Tokens of several sequences: as spans and the columns an engine takes, or as entries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from infercore.engine import arguments
from infercore.errors import InvalidSequenceError
from infercore.values import checks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from infercore.protocols.spi import FloatArray, TokenArray

_SHAPE = "(seq_id, tokens, logits) spans"
_FEW = 32


@attrs.frozen
class Spans:
    """Spans that hold at least one token each, of different sequences, one behind the other.

    ``tokens`` are those of all spans; span ``i`` has ``lengths[i]`` of them, belongs to
    ``seq_ids[i]`` and wants the output rows of "last", "all" or "none" as ``logits[i]`` says.
    ``vectors`` float32 [n_tokens, n_embd] are what the engine takes in place of tokens; ``tokens``
    are the negative numbers then that stand for them.
    """

    tokens: TokenArray
    seq_ids: list[int]
    lengths: list[int]
    logits: list[str]
    vectors: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def wants_inner_rows(self) -> bool:
        """Whether a row of a token that is not its span's last one is wanted."""
        return any(
            mode == "all" and n > 1 for mode, n in zip(self.logits, self.lengths, strict=True)
        )

    def rows(self) -> tuple[list[tuple[int, ...]], dict[int, int]]:
        """Return the owner of each output row, and the last row of each sequence that has one."""
        owners: list[tuple[int, ...]] = []
        ends = {}
        for seq_id, n, mode in zip(self.seq_ids, self.lengths, self.logits, strict=True):
            if mode != "none":
                owners += [(seq_id,)] * (n if mode == "all" else 1)
                ends[seq_id] = len(owners) - 1
        return owners, ends

    def columns(self, starts: Sequence[int]) -> Columns:
        """Return the columns of an engine call, where span ``i`` begins at ``starts[i]``."""
        if len(self) == len(self.seq_ids):  # a token each, as in most steps
            return Columns(
                self.tokens,
                np.array(starts, dtype=np.int32),
                np.array(self.seq_ids, dtype=np.int32),
                np.array([mode != "none" for mode in self.logits]),
                self.vectors,
            )
        lengths = np.array(self.lengths, dtype=np.int32)
        ends = np.cumsum(lengths, dtype=np.int32)
        offsets = np.array(starts, dtype=np.int32) - (ends - lengths)
        wanted = np.repeat([mode == "all" for mode in self.logits], lengths)
        wanted[ends - 1] = [mode != "none" for mode in self.logits]
        return Columns(
            self.tokens,
            np.arange(len(self), dtype=np.int32) + np.repeat(offsets, lengths),
            np.repeat(np.array(self.seq_ids, dtype=np.int32), lengths),
            wanted,
            self.vectors,
        )

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield what of the tokens ``start:stop`` each span has.

        As (index of the span, number of its tokens before, first token, one behind the last).
        """
        first = 0
        for i, n in enumerate(self.lengths):
            low, high = max(first, start), min(first + n, stop)
            if low < high:
                yield i, low - first, low, high
            first += n


@attrs.frozen
class Columns:
    """Token, position and sequence of each entry, and whether it gets an output row."""

    tokens: TokenArray
    positions: npt.NDArray[np.int32]
    seq_ids: npt.NDArray[np.int32]
    wanted: npt.NDArray[np.bool_]
    vectors: FloatArray | None = None

    def part(self, start: int, stop: int) -> Columns:
        """Return the entries ``start:stop``."""
        at = slice(start, stop)
        vectors = None if self.vectors is None else self.vectors[at]
        return Columns(
            self.tokens[at], self.positions[at], self.seq_ids[at], self.wanted[at], vectors
        )


def check_spans(spans: Any, n_vocab: int, n_seq_max: int, n_embd: int = 0) -> Spans:
    """Return ``(seq_id, tokens, logits)`` spans, without those that have no tokens.

    Raises `InvalidInputError`, `InvalidTokenError` or `InvalidSequenceError`, the last also for a
    sequence that has two spans.
    """
    flat: list[Any] = []
    vectors: list[FloatArray] = []
    seq_ids, lengths, modes = [], [], []
    for span in checks.items("spans", spans, _SHAPE):
        try:
            seq_id, tokens, logits = span
        except (TypeError, ValueError) as error:
            raise checks.refuse("spans", span, _SHAPE) from error
        if type(seq_id) is not int or not 0 <= seq_id < n_seq_max:
            seq_id = arguments.check_sequence(seq_id, n_seq_max)
        mode = arguments.check_logits_mode(logits)
        if type(tokens) is not list or (tokens and type(tokens[0]) is not int):
            if arguments.are_vectors(tokens):
                found = arguments.check_vectors(tokens, n_embd)
                vectors.append(found)
                tokens = arguments.numbers_of(found)
            else:
                tokens = arguments.check_tokens(tokens, n_vocab).tolist()
        if seq_id in seq_ids:
            raise _twice(seq_id)
        if tokens:
            seq_ids.append(seq_id)
            lengths.append(len(tokens))
            modes.append(mode)
            flat += tokens
    if not any(map(len, vectors)):
        return Spans(_as_tokens(flat, n_vocab), seq_ids, lengths, modes)
    if sum(map(len, vectors)) < len(flat):
        allowed = "token ids in all spans, or rows of numbers in all: two calls"
        raise checks.refuse("spans", "ids beside rows of numbers", allowed)
    ids = np.array(flat, dtype=np.int32)
    return Spans(ids, seq_ids, lengths, modes, np.concatenate(vectors))


def _as_tokens(tokens: list[Any], n_vocab: int) -> TokenArray:
    """Return checked ``tokens``: one by one where there are few, which takes less than columns."""
    if len(tokens) <= _FEW:
        for token in tokens:
            if type(token) is not int or not 0 <= token < n_vocab:
                break
        else:
            return np.array(tokens, dtype=np.int32)
    return arguments.check_tokens(tokens, n_vocab)


Entries = tuple[list[int], list[tuple[int, ...]], list[bool]]


def check_entries(entries: Any, n_vocab: int, n_seq_max: int) -> Entries:
    """Return tokens, sequences and wanted rows of ``(token, seq_ids, want_logits)`` entries.

    Raises `InvalidInputError`, `InvalidTokenError` or `InvalidSequenceError`.
    """
    tokens: list[int] = []
    seq_ids: list[tuple[int, ...]] = []
    wanted: list[bool] = []
    for entry in checks.items("entries", entries, "(token, seq_ids, want_logits) entries"):
        try:
            token, ids, want = entry
            ids = tuple(ids)
        except (TypeError, ValueError) as error:
            raise checks.refuse("entries", entry, "(token, seq_ids, want_logits)") from error
        tokens.append(arguments.check_token(token, n_vocab))
        checked = tuple(arguments.check_sequence(s, n_seq_max, "seq_ids") for s in ids)
        if not checked or len(set(checked)) != len(checked):
            raise checks.refuse("seq_ids", ids, "at least one sequence id, each once")
        seq_ids.append(checked)
        wanted.append(arguments.check_bool("want_logits", want))
    return tokens, seq_ids, wanted


def _twice(seq_id: int) -> InvalidSequenceError:
    return InvalidSequenceError(
        f"sequence {seq_id} has two spans; join their tokens to one",
        field="seq_id",
        value=seq_id,
        allowed="each sequence once",
    )
