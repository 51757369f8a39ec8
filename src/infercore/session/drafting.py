"""Guesses of the next tokens, to be verified by the model in one call.

Sources: prompt lookup decoding (Saxena, 2023) for n-grams, speculative decoding with a draft
model (Leviathan et al., 2023, arXiv:2211.17192). Each token is still chosen by the sampler from
the model's own logits, so that what is generated does not depend on the guesses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from infercore.errors import InvalidInputError, UnsupportedFeatureError
from infercore.session.resident import Resident

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infercore.values.config import SpeculativeConfig


class Drafter(Protocol):
    """**Protocol:** guesses what follows a list of tokens."""

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """Return up to ``n`` tokens that may follow ``tokens``; none is a fine answer."""

    def close(self) -> None:
        """Release what the drafter holds; idempotent."""


class PromptLookup:
    """Guesses that what followed the last few tokens before will follow them again."""

    def __init__(self, n_gram: int) -> None:
        self._n_gram = n_gram
        self._seen: dict[tuple[int, ...], int] = {}
        self._n_indexed = 0

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """Return what followed the longest n-gram at the end of ``tokens``, where it stood last."""
        self._index(tokens)
        for size in range(min(self._n_gram, len(tokens)), 0, -1):
            at = self._seen.get(tuple(tokens[-size:]))
            if at is not None:
                return list(tokens[at : at + n])
        return []

    def _index(self, tokens: Sequence[int]) -> None:
        """Note where each n-gram ends, but for those at the very end: nothing followed them."""
        for end in range(max(1, self._n_indexed + 1), len(tokens)):
            for size in range(1, min(self._n_gram, end) + 1):
                self._seen[tuple(tokens[end - size : end])] = end
            self._n_indexed = end

    def close(self) -> None:
        """Nothing is held."""


class DraftModel:
    """Guesses with a smaller model of the same vocabulary, greedily, in a context of its own."""

    def __init__(self, model: Any, n_ctx: int, **threads: int | None) -> None:
        self._context = model.new_context(n_ctx=n_ctx, **threads)
        self._resident = Resident(self._context)

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """Return the ``n`` tokens that the draft model finds likeliest, one after the other."""
        room = self._context.n_ctx_seq - len(tokens)
        self._resident.hold(tokens, need_logits=True)
        guesses: list[int] = []
        for _ in range(min(n, room)):
            guesses.append(int(self._context.logits(-1).argmax()))
            self._resident.append_one(guesses[-1])
        return guesses

    def close(self) -> None:
        """Give the draft context's memory back."""
        self._context.close()


def new_drafter(config: SpeculativeConfig, session: Any) -> Drafter:
    """Return the drafter that ``config`` asks for.

    Raises `UnsupportedFeatureError` where the session's context cannot verify guesses, and
    `InvalidInputError` for a draft model with another vocabulary.
    """
    kinds = session.context.capabilities
    removes = kinds.kv_remove in {"any", "suffix"} or kinds.max_rollback > config.n_draft
    if not (removes and kinds.logits_all):
        raise UnsupportedFeatureError(
            feature="speculative",
            backend=session.model.backend,
            hint="guesses are verified with logits of every token and taken back; this context "
            "cannot do both",
        )
    if config.kind == "prompt_lookup":
        return PromptLookup(config.n_gram)
    draft = config.draft_model
    if draft.tokenizer.digest != session.model.tokenizer.digest:
        raise InvalidInputError(
            "the draft model has another vocabulary; draft and model must share their tokens",
            field="draft_model",
            value=draft.tokenizer.digest,
            allowed=session.model.tokenizer.digest,
        )
    asked = session.context.config
    threads: dict[str, int | None] = {}
    if draft.backend == session.model.backend:
        threads = {name: getattr(asked, name) for name in ("n_threads", "n_threads_batch")}
    return DraftModel(draft, session.context.n_ctx_seq, **threads)
