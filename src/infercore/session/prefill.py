"""Prefix and suffix: making the context equal a text, and saying truly what that took."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from infercore.engine.arguments import check_token
from infercore.errors import InvalidInputError, InvalidStateError
from infercore.session.base import SessionBase
from infercore.session.parts import DECODED, EMPTY, PREFIXED, READY, Parts
from infercore.session.resident import Outcome
from infercore.session.segments import bytes_of
from infercore.session.tape import common_prefix
from infercore.values import checks
from infercore.values.manifest import hash_bytes, hash_text, hash_token_ids
from infercore.values.session import PrefixInput, PrefixStatus, SuffixInput, SuffixStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infercore.errors import ManifestMismatchError
    from infercore.values.manifest import ContextManifest


class Prefilling(SessionBase):
    """ensure_prefix and prefill_suffix."""

    def ensure_prefix(
        self, prefix: PrefixInput | str | Sequence[int], *, timeout: float | None = None
    ) -> PrefixStatus:
        """Make the context equal ``prefix``; see `Session.ensure_prefix`.

        Raises `ContextOverflowError` (stage "prefix"), `ManifestMismatchError` (asked for) and
        `InvalidInputError`, all *unchanged*; `DecodeAbortedError` when cancelled (*partial*:
        what was evaluated is reused when asked again).
        """
        checks.check_seconds("timeout", timeout)
        with self.entered("ensure_prefix", timeout):
            return self.put_prefix(as_input(prefix, PrefixInput, "prefix"))

    def prefix_ids(self, given: PrefixInput) -> list[int]:
        """Return the token ids of ``given``. Raises `InvalidTokenError`."""
        if given.text is None:
            return self._given_ids(given)
        return self.encode(given.text, parse_special=given.parse_special)

    def put_prefix(self, given: PrefixInput, ids: list[int] | None = None) -> PrefixStatus:
        """Do what `ensure_prefix` does, in a session that is held; ``ids`` are its `prefix_ids`."""
        if ids is None:
            ids = self.prefix_ids(given)
        changed = self.changed
        reason = self._reset_reason(given) or (changed and f"{changed} changed")
        self.resident.check_fits(ids, stage="prefix", resident=0)
        n_dropped = self.begin_anew_if_changed()
        outcome = self.prefilled(lambda: self._hold_prefix(ids, cold=reason is not None), EMPTY)
        outcome = attrs.evolve(outcome, dropped=outcome.dropped + n_dropped)
        self._enter_prefix(given, ids, outcome)
        return PrefixStatus(reset_reason=reason, **self._status_fields(outcome))

    def put_empty_prefix(self, *, as_text: bool) -> None:
        """Put the prefix "", or no tokens, before a suffix that follows at once.

        It is evaluated with that, in one engine call, where no state is kept between them.
        """
        empty = PrefixInput(text="") if as_text else PrefixInput(tokens=())
        ids = self.encode("", parse_special=False) if as_text else []
        fits = len(ids) <= self.resident.capacity(ids)
        if fits and self.resident.goes_back_freely and self.changed is None:
            self._enter_prefix(empty, ids, Outcome(reused=0, prefilled=0, dropped=0))
        else:
            self.put_prefix(empty)

    def _given_ids(self, given: PrefixInput | SuffixInput) -> list[int]:
        """Return the token ids that were given. Raises `InvalidTokenError`."""
        n_vocab = self._tokenizer.n_vocab
        return [check_token(token, n_vocab, field="tokens") for token in given.tokens or ()]

    def _hold_prefix(self, ids: list[int], *, cold: bool) -> Outcome:
        if not cold:
            return self.resident.hold_prefix(ids)
        n_cold = self.resident.clear()
        with self.resident.cold():
            outcome = self.resident.hold_prefix(ids)
        return attrs.evolve(outcome, dropped=outcome.dropped + n_cold)

    def _reset_reason(self, given: PrefixInput) -> str | None:
        mismatch = self._mismatch(given.manifest)
        if mismatch is None:
            return None
        if given.on_mismatch == "error":
            raise mismatch
        return f"{mismatch.field} changed"

    def _mismatch(
        self, stated: ContextManifest | None, *, renews: bool = True
    ) -> ManifestMismatchError | None:
        """Return what ``stated`` differs in from the session as it is, or as it becomes anew."""
        if stated is None:
            return None
        own = self.identity_now() if renews and self.changed is not None else self.identity
        return own.mismatch(stated)

    def _enter_prefix(self, given: PrefixInput, ids: list[int], outcome: Outcome) -> None:
        parts = Parts(
            prefix=given,
            prefix_ids=ids,
            byte_hash=self._byte_hash(given, ids),
            token_hash=hash_token_ids(ids),
            n_prefix=len(ids),
            n_evaluated=outcome.prefilled,
        )
        self.enter(PREFIXED, parts)
        self.context.count_reused(outcome.reused)
        self.resident.checkpoint()

    def _byte_hash(self, given: PrefixInput, ids: list[int]) -> str:
        if given.text is not None:
            return hash_text(given.text)
        return hash_bytes(bytes_of(ids, self._tokenizer))

    def prefill_suffix(
        self, suffix: SuffixInput | str | Sequence[int], *, timeout: float | None = None
    ) -> SuffixStatus:
        """Put the volatile text after the prefix; see `Session.prefill_suffix`.

        Raises `InvalidStateError` without a prefix, `ContextOverflowError` (stage "suffix"),
        `ManifestMismatchError` and `InvalidInputError`, all *unchanged*; `DecodeAbortedError`
        when cancelled (*partial*: the prefix stands, asking again resumes).
        """
        checks.check_seconds("timeout", timeout)
        with self.entered("prefill_suffix", timeout):
            given: SuffixInput = as_input(suffix, SuffixInput, "suffix")
            self._check_prefixed()
            return self.put_suffix(given)

    def put_suffix(self, given: SuffixInput, *, decodes: bool = False) -> SuffixStatus:
        """Do what `prefill_suffix` does, in a session that is held and has a prefix.

        ``decodes``: one that replaces the suffix is refused too where no token fits behind it.
        """
        mismatch = self._mismatch(given.manifest, renews=given.mode == "replace")
        if mismatch is not None:
            raise mismatch
        if given.mode == "append" and not self._may_join(given):
            return self._append_suffix(given)
        status = self._replace_suffix(given, decodes=decodes)
        self.parts.suffix_class = given.cache_class
        return status

    def _renew_prefix(self) -> None:
        """Evaluate the prefix anew where it was made with what is no longer in force."""
        given, ids = self.parts.prefix, self.parts.prefix_ids
        is_written = given is not None and not self.parts.templated
        self.put_prefix(given if given is not None and is_written else PrefixInput(tokens=ids))

    def _may_join(self, given: SuffixInput) -> bool:
        """Whether text that is added can be tokenized with prefix and suffix as one text."""
        parts, prefix = self.parts, self.parts.prefix
        written = parts.n_generated or parts.templated or parts.ended_by is not None
        if written or self.resident.tape.is_cut or not parts.merges:
            return False
        if prefix is None or prefix.text is None:
            return False
        return given.boundary == "joint" and given.parse_special == prefix.parse_special

    def _check_prefixed(self) -> None:
        if self._state == EMPTY:
            raise InvalidStateError(
                "prefill_suffix needs a prefix; call ensure_prefix first ('' is one)",
                operation="prefill_suffix",
                state=EMPTY,
            )

    def _replace_suffix(self, given: SuffixInput, *, decodes: bool) -> SuffixStatus:
        if given.text is None:
            text: str | None = None
            merges = False
            ids = self.parts.prefix_ids + self._given_ids(given)
        else:
            before = "" if given.mode == "replace" else self.parts.suffix_text
            text = f"{before}{given.text}"
            merges = given.boundary == "joint" or not text
            ids = self._suffix_ids(given, text)
        if decodes:
            fitted, stands, _ = self._fitted(ids)
            self.check_room(fitted, stands)
        if given.mode == "replace" and self.changed is not None:
            self._fitted(ids)  # before anything changes
            self._renew_prefix()
        return self.set_suffix(ids, text, merges=merges)

    def set_suffix(
        self, ids: list[int], text: str | None, *, merges: bool, n_ahead: int = 0
    ) -> SuffixStatus:
        """Make the context equal ``ids``, which are those of the prefix and ``text`` behind it.

        ``text`` is None where the caller gave ids.
        The last ``n_ahead`` of them were evaluated for it before, so they are no reuse.
        """
        parts = self.parts
        ids, stands, dropped = self._fitted(ids)
        outcome = self.prefilled(lambda: self.resident.hold(ids, need_logits=True), PREFIXED)
        outcome = attrs.evolve(
            outcome, reused=outcome.reused - n_ahead, prefilled=outcome.prefilled + n_ahead
        )
        parts.forget_volatile()
        parts.n_prefix = stands
        parts.suffix_text = text
        parts.plain = not dropped
        parts.merges = merges and not dropped
        seam = len(parts.prefix_ids) - stands
        return self._enter_suffix(outcome, stands, seam_tokens=seam, truncated_tokens=dropped)

    def _fitted(self, ids: list[int]) -> tuple[list[int], int, tuple[int, ...]]:
        """Return the ids that fit, how many of the prefix stand, and the ids that were dropped.

        Raises `ContextOverflowError` (stage "suffix"), *unchanged*.
        """
        stands = common_prefix(ids, self.parts.prefix_ids)
        ids, dropped = self.truncated(ids, stands)
        self.resident.check_fits(ids, stage="suffix", resident=stands)
        return ids, stands, dropped

    def check_room(self, target: list[int], n_prefix: int, *, may_shift: bool = True) -> None:
        """Raise `ContextOverflowError` unless a token fits behind ``target``, or can be made to."""
        shifts = may_shift and self.overflow == "shift" and len(target) - n_prefix > 1
        self.resident.check_fits(
            target, more=0 if shifts else 1, stage="decode", resident=len(target)
        )

    def truncated(self, ids: list[int], stands: int) -> tuple[list[int], tuple[int, ...]]:
        """Drop the oldest suffix tokens that do not fit, where that was asked for.

        The first ``stands`` are kept, and one place is left free, so that a decode can begin.
        """
        excess = len(ids) - (self.resident.capacity(ids[:stands]) - 1)
        room = len(ids) - stands - 1
        if self.overflow != "truncate" or not 0 < excess <= room:
            return ids, ()
        cut = stands + excess
        return ids[:stands] + ids[cut:], tuple(ids[stands:cut])

    def _suffix_ids(self, given: SuffixInput, text: str) -> list[int]:
        prefix, special = self.parts.prefix, given.parse_special
        if not text:
            return list(self.parts.prefix_ids)
        joins = given.boundary == "joint" and not self.parts.templated
        if prefix is None or prefix.text is None or not joins:
            tail = self.encode(text, parse_special=special, add_special=False)
            return self.parts.prefix_ids + tail
        if special != prefix.parse_special and prefix.text:
            raise InvalidInputError(
                "prefix and suffix differ in parse_special, so they cannot be tokenized as one "
                "text; give boundary='split'",
                field="parse_special",
                value=special,
                allowed=prefix.parse_special,
            )
        return self.encode(prefix.text + text, parse_special=special)

    def _append_suffix(self, given: SuffixInput) -> SuffixStatus:
        """Add to the end, tokenized apart: what is there stays as it is."""
        ended_by = self.parts.ended_by
        ids = [] if ended_by is None else [ended_by]
        if given.text is None:
            ids += self._given_ids(given)
        else:
            ids += self.encode(given.text, parse_special=given.parse_special, add_special=False)
        before = self.resident.wanted()
        self.resident.check_fits([*before, *ids], stage="suffix", resident=len(before))
        fallback = PREFIXED if self._state == PREFIXED else DECODED
        outcome = self.prefilled(lambda: self.resident.go_on(ids), fallback)
        self.parts.plain = self.parts.merges = False
        return self._enter_suffix(outcome, len(before))

    def _enter_suffix(self, outcome: Outcome, n_before: int, **fields: Any) -> SuffixStatus:
        """Be READY; ``n_before`` tokens were not asked for in this call."""
        self._state = READY
        self.parts.ended_by = None
        self.parts.n_evaluated += outcome.prefilled
        self.context.count_reused(max(0, outcome.reused - n_before))
        self.resident.checkpoint()
        again = max(0, n_before - outcome.reused)
        shown = attrs.evolve(
            outcome,
            reused=max(0, outcome.reused - n_before),
            prefilled=outcome.prefilled - again,
        )
        return SuffixStatus(reevaluated_tokens=again, **fields, **self._status_fields(shown))

    def _status_fields(self, outcome: Outcome) -> dict[str, Any]:
        parts, logical = self.parts, self.resident.tape.logical
        return {
            "reused_tokens": outcome.reused,
            "prefilled_tokens": outcome.prefilled,
            "dropped_tokens": outcome.dropped,
            "prefix_tokens": parts.n_prefix,
            "suffix_tokens": logical - parts.n_prefix,
            "resident_tokens": logical,
            "shared_tokens": min(outcome.shared, outcome.reused),
            "restored_tokens": min(outcome.restored, outcome.reused),
            "available_tokens": self.resident.available(),
            "n_ctx": self.context.n_ctx_seq,
            "stable_byte_hash": parts.byte_hash,
            "stable_token_hash": parts.token_hash,
            "manifest_digest": self._manifest_digest,
        }


def as_input(value: Any, cls: Any, field: str) -> Any:
    if isinstance(value, cls):
        return value
    if isinstance(value, str):
        return cls(text=value)
    if isinstance(value, (bytes, bytearray)) or not hasattr(value, "__getitem__"):
        raise checks.refuse(field, value, f"a str, a sequence of token ids or a {cls.__name__}")
    return cls(tokens=value)
