"""What a session's logical context is made of, and the names of its states."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from infercore.values.session import PrefixInput

EMPTY, PREFIXED, READY, DECODED = "EMPTY", "PREFIXED", "READY", "DECODED"
CLOSED, FATAL = "CLOSED", "FATAL"


@attrs.define
class Parts:
    """Prefix, suffix and what was generated.

    ``n_prefix`` tokens of the prefix stand (fewer than ``prefix_ids`` where it gave way at the
    seam). ``n_evaluated`` were evaluated since the last decode began. ``ended_by`` is the
    end-of-generation token that the last decode stopped at. ``templated``: the prefix tokens are
    a chat template's, in which messages are kept apart; they are not those of its text alone.
    ``plain``: what follows the prefix is ``suffix_text`` and then what was generated. ``merges``:
    the suffix was tokenized with the prefix as one text, so that more text may join it.
    ``suffix_text`` is None where the suffix was given as token ids. ``suffix_class`` is the
    suffix's cache class, where one was stated.
    """

    prefix: PrefixInput | None = None
    prefix_ids: list[int] = attrs.field(factory=list)
    byte_hash: str | None = None
    token_hash: str | None = None
    n_prefix: int = 0
    n_generated: int = 0
    suffix_text: str | None = ""
    n_evaluated: int = 0
    ended_by: int | None = None
    templated: bool = False
    plain: bool = True
    merges: bool = True
    suffix_class: str | None = None

    def copy(self) -> Parts:
        """Return an independent copy."""
        twin = copy.copy(self)
        twin.prefix_ids = list(self.prefix_ids)
        return twin

    def fit(self, n_tokens: int) -> None:
        """Count no more than ``n_tokens``, where a call ended between two counts."""
        if self.n_prefix + self.n_generated > n_tokens:
            self.n_prefix = min(self.n_prefix, n_tokens)
            self.n_generated = n_tokens - self.n_prefix

    def forget_volatile(self) -> None:
        """Have only a prefix."""
        self.n_generated, self.suffix_text, self.ended_by, self.plain = 0, "", None, True
        self.merges = True
        self.suffix_class = None
