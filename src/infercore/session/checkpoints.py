"""States kept to go back to, where an engine cannot remove tokens from the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from infercore.errors import SessionFatalError
from infercore.session.tape import common_prefix

if TYPE_CHECKING:
    from collections.abc import Sequence

_N_OLDER = 2


@attrs.frozen(kw_only=True)
class Checkpoint:
    """The state of a sequence at the end of ``tokens``, with or without the logits there."""

    tokens: list[int]
    data: bytes = attrs.field(repr=False)
    has_logits: bool


class Checkpoints:
    """The few states of one sequence that lie on the way to its latest text."""

    def __init__(self, context: Any, seq_id: int) -> None:
        kinds = context.capabilities
        self._context = context
        self._seq_id = seq_id
        self._saved: list[Checkpoint] = []
        self.needed = kinds.kv_remove in ("none", "rollback")
        self._possible = self.needed and kinds.sequence_state

    def take(self, tokens: list[int], *, has_logits: bool) -> None:
        """Keep the state that the sequence has now, at the end of ``tokens``.

        A state that cannot be saved is not kept: going back then evaluates anew.
        """
        if not self._possible or not tokens or self._known(tokens, has_logits=has_logits):
            return
        try:
            data = self._context.save_sequence(self._seq_id)
        except SessionFatalError:
            raise
        except Exception:  # noqa: BLE001  (whatever it was: the text itself is in place)
            return
        fresh = Checkpoint(tokens=tokens, data=data, has_logits=has_logits)
        older = [c for c in self._saved if c.tokens != tokens and _begins(c.tokens, tokens)]
        self._saved = [*older[-_N_OLDER:], fresh]

    def _known(self, tokens: list[int], *, has_logits: bool) -> bool:
        return any(c.tokens == tokens and c.has_logits >= has_logits for c in self._saved)

    def best(self, target: list[int], *, need_logits: bool) -> Checkpoint | None:
        """Return the longest state on the way to ``target``; at its very end maybe with logits."""
        usable = [
            c
            for c in self._saved
            if _begins(c.tokens, target)
            and (len(c.tokens) < len(target) or c.has_logits or not need_logits)
        ]
        return max(usable, key=lambda c: len(c.tokens), default=None)

    def drop(self, checkpoint: Checkpoint) -> None:
        """Forget a state that the engine refused."""
        self._saved = [c for c in self._saved if c is not checkpoint]

    def move_to(self, context: Any) -> None:
        """Save from and load into ``context`` from now on."""
        self._context, self._seq_id = context, 0

    def clear(self) -> None:
        """Forget all."""
        self._saved = []

    def adopt(self, other: Checkpoints) -> None:
        """Know what ``other`` knows."""
        self._saved = list(other._saved)


def _begins(tokens: Sequence[int], target: Sequence[int]) -> bool:
    return common_prefix(tokens, target) == len(tokens)
