"""From the model's row to the logits that candidates are taken from.

Order: processors, constraint mask, bias (with ``ignore_eos``), repeated n-grams, penalties, dry.
The row is only copied where one of them has something to do.
"""

# ruff: noqa: SLF001  (a clone is filled in by its own class)

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from infercore.errors import InvalidInputError, InvalidStateError, InvalidTokenError
from infercore.sampling.dry import apply_dry, compile_breakers
from infercore.sampling.edits import apply_bias, apply_no_repeat, apply_penalties
from infercore.sampling.eog import eog_ids
from infercore.values import checks

if TYPE_CHECKING:
    from infercore.protocols.public import Tokenizer
    from infercore.sampling.candidates import FloatArray, IdArray
    from infercore.sampling.constraints import Constraint
    from infercore.sampling.history import TokenHistory
    from infercore.values.config import SamplingConfig

_FLOAT32 = np.dtype(np.float32)


class LogitRules:
    """What one sampler does to each row, compiled once. Holds a scratch row of its own."""

    def __init__(
        self,
        config: SamplingConfig,
        tokenizer: Tokenizer,
        n_vocab: int,
        processors: tuple[Any, ...] = (),
    ) -> None:
        self._config = config
        self._n_vocab = n_vocab
        self._shape = (n_vocab,)
        self._processors = processors
        self._bias = _compile_bias(config, tokenizer, n_vocab)
        self._penalises = config.penalty_last_n != 0 and (
            config.repeat_penalty != 1
            or config.frequency_penalty != 0
            or config.presence_penalty != 0
        )
        self._breakers = (
            compile_breakers(tokenizer, config.dry_sequence_breakers, n_vocab)
            if config.dry_multiplier != 0 and config.dry_penalty_last_n != 0
            else None
        )
        self._n_gram = config.no_repeat_ngram_size
        self._looks_back = bool(self._penalises or self._breakers is not None or self._n_gram)
        self._scratch: FloatArray | None = None

    @property
    def only_lowered(self) -> frozenset[int] | None:
        """The tokens whose logits `apply` lowers, where it does nothing else, constraints aside.

        None where it may do anything else. A row's best token that is none of them stays the best.
        """
        if self._processors or self._looks_back:
            return None
        if self._bias is None:
            return frozenset()
        ids, amounts = self._bias
        return frozenset(ids.tolist()) if (amounts <= 0).all() else None

    @property
    def counted_window(self) -> int:
        """Over how many tokens penalties count (-1 = all, 0 = they are off)."""
        return self._config.penalty_last_n if self._penalises else 0

    def clone(self) -> LogitRules:
        """Return rules that share what is constant, with a scratch row of their own."""
        twin = LogitRules.__new__(LogitRules)
        vars(twin).update(vars(self))
        twin._scratch = None
        return twin

    def apply(
        self,
        logits: FloatArray,
        history: TokenHistory,
        constraint: Constraint | None,
        held_back: IdArray | None = None,
    ) -> FloatArray:
        """Return the row after all rules: ``logits`` itself, or the scratch row [n_vocab].

        The ids ``held_back`` are forbidden too, unless the constraint leaves no others.

        Raises `InvalidInputError` for a row or a processor's result of another shape or type,
        `InvalidStateError` for NaN, infinity, or no token left.
        """
        self.check_row(logits)
        self.check_values(logits)
        ready = self._edited(logits, history, constraint, held_back)
        if ready is not logits and _largest(ready, "the sampling config") == -np.inf:
            _fail(
                "processors, constraint, logit_bias, ignore_eos, min_tokens and "
                "no_repeat_ngram_size together forbid every token; stop when the constraint is "
                "finished, or forbid less",
                "no token left",
            )
        return ready

    def check_row(self, row: FloatArray) -> None:
        """Raise `InvalidInputError` unless ``row`` is float32 [n_vocab]."""
        if type(row) is not np.ndarray or row.dtype is not _FLOAT32 or row.shape != self._shape:
            self._check_row(row, "logits")

    @staticmethod
    def check_values(row: FloatArray) -> None:
        """Raise `InvalidStateError` for NaN or infinity in ``row``, or where all are -inf."""
        if _largest(row, "the model") == -np.inf:
            _fail("every logit of the model is -inf", "no token possible")

    def _edited(
        self,
        logits: FloatArray,
        history: TokenHistory,
        constraint: Constraint | None,
        held_back: IdArray | None,
    ) -> FloatArray:
        row = self._processed(logits, history)
        changes = constraint is not None or self._bias is not None or held_back is not None
        if not changes and not (self._looks_back and len(history)):
            return row
        row = self._own(row)
        if constraint is not None:
            constraint.apply(row)
        if self._bias is not None:
            apply_bias(row, *self._bias)
        if held_back is not None:
            ends = row[held_back]
            row[held_back] = -np.inf
            if constraint is not None and row.max() == -np.inf:  # the text is complete
                row[held_back] = ends
        self._look_back(row, history)
        return row

    def _processed(self, logits: FloatArray, history: TokenHistory) -> FloatArray:
        row = logits
        for processor in self._processors:
            apply = getattr(processor, "apply", None)
            if apply is None:
                row = processor(history.last(-1).copy(), row.copy())
            else:
                row = apply(row.copy())
            self._check_row(row, "processors")
            _largest(row, "a processor")
        return row

    def _own(self, row: FloatArray) -> FloatArray:
        if self._scratch is None:
            self._scratch = np.empty(self._n_vocab, dtype=np.float32)
        np.copyto(self._scratch, row)
        return self._scratch

    def _look_back(self, row: FloatArray, history: TokenHistory) -> None:
        config = self._config
        if self._n_gram:
            apply_no_repeat(row, history.last(-1), self._n_gram)
        if self._penalises:
            window = history.last(config.penalty_last_n)
            apply_penalties(
                row,
                window,
                history.counts(window),
                repeat=config.repeat_penalty,
                frequency=config.frequency_penalty,
                presence=config.presence_penalty,
            )
        if self._breakers is not None:
            apply_dry(
                row,
                history.last(config.dry_penalty_last_n),
                self._breakers,
                multiplier=config.dry_multiplier,
                base=config.dry_base,
                allowed_length=config.dry_allowed_length,
            )

    def _check_row(self, row: object, field: str) -> None:
        if (
            isinstance(row, np.ndarray)
            and row.shape == (self._n_vocab,)
            and row.dtype == np.float32
        ):
            return
        shape = f"{row.dtype} {list(row.shape)}" if isinstance(row, np.ndarray) else type(row)
        raise InvalidInputError(
            f"{field} gave {shape}, not float32 [{self._n_vocab}]",
            field=field,
            value=shape,
            allowed=f"a NumPy array float32 [{self._n_vocab}]",
        )


def _compile_bias(
    config: SamplingConfig, tokenizer: Tokenizer, n_vocab: int
) -> tuple[IdArray, FloatArray] | None:
    amounts = {int(token): float(amount) for token, amount in config.logit_bias.items()}
    for token in amounts:
        if token >= n_vocab:
            raise InvalidTokenError(
                f"logit_bias names token {checks.shown(token)}, the vocabulary has {n_vocab}",
                field="logit_bias",
                value=token,
                allowed=f"0 to {n_vocab - 1}",
            )
    if config.ignore_eos:
        amounts.update((int(token), -np.inf) for token in eog_ids(tokenizer) if token < n_vocab)
    if not amounts:
        return None
    ids = np.array(sorted(amounts), dtype=np.intp)
    with np.errstate(over="ignore"):  # what is below float32 forbids
        return ids, np.array([amounts[token] for token in ids.tolist()], dtype=np.float32)


def _largest(row: FloatArray, source: str) -> float:
    """Return the maximum; NaN anywhere, or +inf, is an error. One pass over the row."""
    peak = float(row.max())
    if not peak < np.inf:
        found = "inf" if peak > 0 else "NaN"
        _fail(f"{source} made the logit of token {int(row.argmax())} {found}; correct it", found)
    return peak


def _fail(text: str, state: str) -> NoReturn:
    raise InvalidStateError(text, operation="sample", state=state)
