"""A sampler whose tokens are noted, so that another process can go on behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from infercore.sampling.logprobs import raw_logprobs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infercore.sampling.portable import PortableSampler
    from infercore.values.session import TokenLogprob

Position = tuple[int, float]


@attrs.define
class Replay:
    """What a decode had made when its process died.

    ``tokens`` were chosen with ``seed``; the sampler stood at ``position`` behind the last one.
    The reader has seen ``n_shown`` chunks.
    """

    seed: int
    tokens: list[int]
    position: Position | None
    n_shown: int


class _Forced:
    """Stands for a constraint that leaves no choice while tokens are replayed."""

    def __init__(self, sampler: NotedSampler) -> None:
        self._sampler = sampler

    def forced_tokens(self) -> Sequence[int]:
        return self._sampler.left


class NotedSampler:
    """A `PortableSampler` that notes what it chose, after replaying what was chosen before.

    ``on_replayed`` hears how many tokens were replayed.
    """

    def __init__(
        self,
        inner: PortableSampler,
        replay: Replay | None = None,
        on_replayed: Callable[[int], object] | None = None,
    ) -> None:
        self._inner = inner
        self.tokens: list[int] = []
        self.left: list[int] = [] if replay is None else list(replay.tokens)
        self._on_replayed = on_replayed
        self._position = None if replay is None else replay.position
        self.mark: tuple[int, Position | None] = (len(self.left), self._position)
        """How many tokens were chosen, and where the sampler stood then; read by other threads.

        Until all is replayed it is the mark that the other process left.
        """
        self._row: Any = None
        self._forced = _Forced(self)

    @property
    def seed(self) -> int:
        """The seed in use."""
        return self._inner.seed

    @property
    def constraint(self) -> Any:
        """The constraint; while tokens are replayed one that forces these."""
        return self._forced if self.left else self._inner.constraint

    def sample(self, context: Any, row: int = -1) -> int:
        """Return a token from output row ``row`` of ``context``, or the next one of the replay."""
        if self.left:
            return self.take(context, row, self.left[0])
        self._row = None
        token = self._inner.sample(context, row)
        self._note([token])
        return token

    def take(self, context: Any, row: int, token: int) -> int:
        """Return ``token``, accepted behind output row ``row``; see `PortableSampler.take`."""
        self._row = np.array(context.logits(row))
        self.observe([token])
        return token

    def observe(self, tokens: Sequence[int], *, constrained: bool = True) -> None:
        """Take in tokens that are there already; see `PortableSampler.observe`."""
        self._inner.observe(tokens, constrained=constrained)
        if not constrained:
            return
        if self.left:
            if self._on_replayed is not None:
                self._on_replayed(min(len(self.left), len(tokens)))
            del self.left[: len(tokens)]
            if not self.left and self._position is not None:
                self._inner.move_to(self._position)
        self._note(tokens)

    def _note(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        if not self.left:
            self.mark = len(self.tokens), self._inner.position

    def last_logprobs(self, top_n: int = 0) -> TokenLogprob:
        """Return the log-probabilities of the latest step."""
        if self._row is not None:
            return raw_logprobs(self._row, self.tokens[-1], top_n)
        return self._inner.last_logprobs(top_n)

    def close(self) -> None:
        """Let go of the sampler; idempotent."""
        self._inner.close()
