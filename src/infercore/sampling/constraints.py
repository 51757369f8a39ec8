"""Constraints on the generated text, by llguidance (the extra ``constraints``)."""

# ruff: noqa: SLF001  (a clone is filled in by its own class)

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.errors import GrammarError, InvalidInputError, InvalidTokenError
from infercore.sampling.eog import eog_ids
from infercore.sampling.grammar import grammar_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infercore.protocols.public import Tokenizer
    from infercore.sampling.candidates import BoolArray, FloatArray

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_FORBIDS = np.where(_BITS == 1, np.float32(0), np.float32(-np.inf))


def compile_constraint(
    response_format: Any, tokenizer: Tokenizer, *, n_vocab: int | None = None
) -> Constraint | None:
    """Return the constraint that ``response_format`` describes, None for None.

    It is one of: a JSON schema as dict, ``{"type": "json_schema", "schema": {...}}``,
    ``{"type": "json_object"}``, ``{"type": "regex", "pattern": "..."}``,
    ``{"type": "choice", "choices": ["...", ...]}``, ``{"type": "lark", "grammar": "..."}``,
    ``{"type": "gbnf", "grammar": "..."}``, ``{"type": "structural_tag", "structures": [{"begin":
    "...", "schema": {...}, "end": "..."}, ...], "triggers": ["...", ...]}`` (free text in which
    a trigger, by default a ``begin`` itself, must go on as one of the structures; their marks are
    text, not control tokens), an attrs class or a pydantic model class. JSON is
    written without free whitespace unless the schema holds ``"x-guidance"`` options that say
    otherwise. ``n_vocab`` is the length of the logits where that is more than the tokenizer's.

    Raises `GrammarError` for a schema or grammar that is wrong or uses what is not supported,
    `InvalidInputError` for anything else that is none of the above, `UnsupportedFeatureError`
    where llguidance is not installed. Nothing is decoded by then.
    """
    if response_format is None:
        return None
    grammar = grammar_of(response_format)
    matcher = grammar.matcher(tokenizer)
    return Constraint(matcher, tokenizer, n_vocab or tokenizer.n_vocab, grammar.source)


class Constraint:
    """Which tokens may come next, so that the text stays within a grammar.

    End-of-generation tokens are allowed where the text is complete; other control tokens never
    are. Made by `compile_constraint`; the mask covers ``n_vocab`` logits.
    """

    def __init__(self, matcher: Any, tokenizer: Tokenizer, n_vocab: int, source: str = "") -> None:
        self._matcher = matcher
        self._source = source
        self._tokenizer = tokenizer  # llguidance refers to it only weakly
        self._n_vocab = n_vocab
        self._n_known = min(n_vocab, tokenizer.n_vocab)
        self._ends = frozenset(eog_ids(tokenizer).tolist())
        self.masks_s = 0.0  # what `apply` took
        self._make_buffer()

    def _make_buffer(self) -> None:
        self._words = np.zeros((self._tokenizer.n_vocab + 31) // 32, dtype=np.int32)
        self._address = self._words.ctypes.data
        self._spread = np.zeros((self._words.nbytes, 8), dtype=np.float32)

    @property
    def is_accepting(self) -> bool:
        """Whether the text so far is complete, so that it may end here."""
        return bool(self._matcher.is_accepting())

    @property
    def is_finished(self) -> bool:
        """Whether nothing but an end-of-generation token may follow."""
        return bool(self._matcher.is_stopped())

    def apply(self, logits: FloatArray) -> None:
        """Set the logits [n_vocab] of all forbidden tokens to -inf, in place.

        Raises `GrammarError` where the grammar has become too complex to follow.
        """
        started = time.perf_counter()
        known = logits[: self._n_known]
        spread = self._spread  # indexing without ``out`` takes ten times as long
        np.take(_FORBIDS, self._allowed_bytes(), axis=0, out=spread, mode="clip")
        known += spread.reshape(-1)[: self._n_known]
        logits[self._n_known :] = -np.inf
        self.masks_s += time.perf_counter() - started

    def allowed(self) -> BoolArray:
        """Return which tokens may come next: bool [n_vocab], the caller's own."""
        mask = np.zeros(self._n_vocab, dtype=np.bool_)
        bits = np.unpackbits(self._allowed_bytes(), bitorder="little", count=self._n_known)
        mask[: self._n_known] = bits
        return mask

    def _allowed_bytes(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        self._matcher.unsafe_compute_mask_ptr(self._address, self._mask_bytes)
        self._check_alive()
        return self._words.view(np.uint8)

    @property
    def _mask_bytes(self) -> int:
        return self._words.nbytes

    def accept(self, token: int) -> None:
        """Go on by one token. Raises `InvalidInputError` where it is not allowed; unchanged."""
        self.accept_all((token,))

    def accept_all(self, tokens: Sequence[int]) -> None:
        """Go on by ``tokens``, all of them or none.

        Raises `InvalidTokenError` for an id outside the vocabulary, `InvalidInputError` for one
        that is not allowed at its place; the constraint is unchanged.
        """
        ids = [int(token) for token in tokens]
        for token in ids:
            if not 0 <= token < self._n_known:
                raise InvalidTokenError(
                    f"token {token} is outside the vocabulary of {self._n_known}",
                    field="tokens",
                    value=token,
                    allowed=f"0 to {self._n_known - 1}",
                )
        n_taken = self._matcher.try_consume_tokens(ids)
        self._check_alive()
        refused = self._first_refused(ids, n_taken)
        if refused is not None:
            self._matcher.rollback(n_taken)
            self._refuse(ids[refused], refused)

    def _first_refused(self, ids: Sequence[int], n_taken: int) -> int | None:
        """Return the place of the first token that may not stand there.

        The matcher takes nothing once it is finished, although its mask allows the ends.
        """
        rest = range(n_taken, len(ids))
        if self.is_finished:
            return next((place for place in rest if ids[place] not in self._ends), None)
        return n_taken if rest else None

    def _refuse(self, token: int, place: int) -> None:
        raise InvalidInputError(
            f"the constraint does not allow token {token} "
            f"({self._tokenizer.token_bytes(token)!r}) at place {place}",
            field="tokens",
            value=token,
            allowed="tokens that keep the text within the response_format",
        )

    def _check_alive(self) -> None:
        if self._matcher.is_error():
            reason = str(self._matcher.get_error()).split("\n<state>")[0]
            raise GrammarError(
                f"the grammar cannot be followed further: {reason}; simplify it, then decode again",
                source=self._source,
            )

    def forced_tokens(self) -> list[int]:
        """Return the tokens that must come next, [] where there is a choice; changes nothing.

        Give them to the engine in one call and to the sampler by ``observe``.
        """
        return list(self._matcher.compute_ff_tokens())

    def reset(self) -> None:
        """Go back to the beginning of the text."""
        self._matcher.reset()

    def clone(self) -> Constraint:
        """Return an independent constraint in the same state."""
        twin = Constraint.__new__(Constraint)
        vars(twin).update(vars(self))
        twin._matcher = self._matcher.deep_copy()
        twin._make_buffer()
        return twin
