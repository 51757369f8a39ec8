"""Wrong prefixes, suffixes and reports."""

from __future__ import annotations

from typing import Any

import attrs

from conformance.mutants import around, breaks, instead, nothing, told
from infercore.errors import ContextOverflowError, InvalidInputError
from infercore.session.session import CoreSession
from infercore.values.session import PrefixInput, SuffixInput


@breaks("REUSE-1", "REUSE-3", "REUSE-4")
def more_is_told_than_was_evaluated(m: Any) -> None:
    told(m, CoreSession, "ensure_prefix", prefilled_tokens=lambda s: s.prefilled_tokens + 1)


@breaks("REUSE-2", "REUSE-3", "REUSE-7", "STATE-14", "CANCEL-7")
def nothing_is_told_as_reused(m: Any) -> None:
    told(
        m, CoreSession, "ensure_prefix",
        reused_tokens=lambda _: 0, prefilled_tokens=lambda s: s.prefix_tokens,
    )  # fmt: skip


@breaks("REUSE-1", "REUSE-7")
def reuse_is_claimed_and_not_real(m: Any) -> None:
    told(
        m, CoreSession, "ensure_prefix",
        reused_tokens=lambda s: s.prefix_tokens, prefilled_tokens=lambda _: 0,
    )  # fmt: skip


@breaks("REUSE-6")
def a_warm_tail_is_not_kept(m: Any) -> None:
    told(m, CoreSession, "explain_context", warm_tail_tokens=lambda _: 0)


@breaks("REUSE-8", "STREAM-14", "CANCEL-8")
def one_more_token_was_generated(m: Any) -> None:
    told(m, CoreSession, "explain_context", generated_tokens=lambda r: r.generated_tokens + 1)


@breaks("REUSE-9")
def the_same_prefix_is_not_gone_back_to(m: Any) -> None:
    def ensure(old: Any, self: Any, prefix: Any) -> Any:
        last = self.__dict__.get("last")
        if last is None or last[0] != prefix:
            self.last = (prefix, old(self, prefix))
        return self.last[1]

    around(m, CoreSession, "ensure_prefix", ensure)


@breaks("REUSE-10")
def a_hash_of_something_else(m: Any) -> None:
    told(m, CoreSession, "prefill_suffix", stable_byte_hash=lambda s: s.stable_token_hash)


@breaks("REUSE-11")
def a_digest_of_the_text(m: Any) -> None:
    told(m, CoreSession, "ensure_prefix", manifest_digest=lambda s: s.stable_byte_hash)


@breaks("REUSE-5")
def a_second_suffix_is_appended(m: Any) -> None:
    def suffix(old: Any, self: Any, given: Any) -> Any:
        if self.state == "DECODED" and isinstance(given, str):
            given = SuffixInput(text=given, mode="append")
        return old(self, given)

    around(m, CoreSession, "prefill_suffix", suffix)


def given_otherwise(m: Any, **changes: Any) -> None:
    """Let suffixes be taken as if these fields had been given."""

    def suffix(old: Any, self: Any, given: Any) -> Any:
        made = SuffixInput(text=given) if isinstance(given, str) else given
        return old(self, attrs.evolve(made, **changes))

    around(m, CoreSession, "prefill_suffix", suffix)


@breaks("REUSE-14")
def an_appended_text_replaces(m: Any) -> None:
    given_otherwise(m, mode="replace")


@breaks("SEAM-1", "SEAM-3", "SEAM-4", base="reference")
def texts_are_always_tokenized_apart(m: Any) -> None:
    given_otherwise(m, boundary="split")


@breaks("SEAM-2", base="reference")
def texts_are_never_tokenized_apart(m: Any) -> None:
    given_otherwise(m, boundary="joint")


@breaks("SEAM-7")
def parse_special_of_a_suffix_is_ignored(m: Any) -> None:
    given_otherwise(m, parse_special=False)


def ids_otherwise(m: Any, change: Any) -> None:
    """Let a prefix of token ids be that of ``change(session, ids)``."""

    def prefix(old: Any, self: Any, given: Any, **fields: Any) -> Any:
        is_text = isinstance(given, (str, PrefixInput))
        return old(self, given if is_text else change(self, given), **fields)

    around(m, CoreSession, "ensure_prefix", prefix)


@breaks("SEAM-10", base="reference")
def ids_get_a_beginning(m: Any) -> None:
    ids_otherwise(m, lambda session, ids: [session.model.tokenizer.bos, *ids])


@breaks("SEAM-10", base="reference")
def ids_become_text(m: Any) -> None:
    ids_otherwise(m, lambda session, ids: session.model.tokenizer.decode(ids))


@breaks("SEAM-10", base="reference")
def text_behind_ids_gets_a_beginning(m: Any) -> None:
    def encode(old: Any, self: Any, text: str, **fields: Any) -> Any:
        return old(self, text, **{**fields, "add_special": True})

    around(m, CoreSession, "encode", encode)


@breaks("SEAM-11")
def an_unknown_id_is_taken_for_another(m: Any) -> None:
    def given(self: Any, asked: Any) -> list[int]:
        return [token % self._tokenizer.n_vocab for token in asked.tokens or ()]

    m.setattr(CoreSession, "_given_ids", given)


@breaks("SEAM-11")
def an_unknown_id_is_met_too_late(m: Any) -> None:
    def prefix(old: Any, self: Any, given: Any, **fields: Any) -> Any:
        if not isinstance(given, (str, PrefixInput)):
            old(self, "")
        return old(self, given, **fields)

    around(m, CoreSession, "ensure_prefix", prefix)


@breaks("SEAM-3", base="reference")
def what_gave_way_is_not_told(m: Any) -> None:
    told(m, CoreSession, "prefill_suffix", seam_tokens=lambda _: 0)


def empty_is_refused(m: Any, method: str) -> None:
    def call(old: Any, self: Any, given: Any) -> Any:
        if given == "":
            raise InvalidInputError("a text must not be empty", field="text", value="")
        return old(self, given)

    around(m, CoreSession, method, call)


@breaks("REUSE-15", "STREAM-11")
def an_empty_prefix_is_refused(m: Any) -> None:
    empty_is_refused(m, "ensure_prefix")


@breaks("SEAM-5")
def an_empty_suffix_is_refused(m: Any) -> None:
    empty_is_refused(m, "prefill_suffix")


@breaks("REUSE-18")
def what_is_no_prefix_becomes_one(m: Any) -> None:
    instead(m, CoreSession, "ensure_prefix", InvalidInputError, lambda _: None)


@breaks("OVER-7")
def an_overflow_names_another_stage(m: Any) -> None:
    def ensure(old: Any, self: Any, prefix: Any) -> Any:
        try:
            return old(self, prefix)
        except ContextOverflowError as error:
            error.stage = "decode"
            raise

    around(m, CoreSession, "ensure_prefix", ensure)


@breaks("OVER-8")
def an_overflow_leaves_another_suffix(m: Any) -> None:
    def suffix(old: Any, self: Any, given: Any) -> Any:
        try:
            return old(self, given)
        except ContextOverflowError:
            old(self, "x")
            raise

    around(m, CoreSession, "prefill_suffix", suffix)


@breaks("OVER-9")
def a_decode_without_room_is_empty(m: Any) -> None:
    instead(m, CoreSession, "decode", ContextOverflowError, lambda _: iter(()))


@breaks("OVER-10")
def what_was_truncated_is_not_told(m: Any) -> None:
    told(m, CoreSession, "prefill_suffix", truncated_tokens=lambda _: ())


@breaks("STREAM-16")
def an_open_stream_holds_nothing(m: Any) -> None:
    nothing(m, CoreSession, "leave_stream")


@breaks("CANCEL-8", "CANCEL-11")
def a_cancel_is_not_heard(m: Any) -> None:
    nothing(m, CoreSession, "cancel")


@breaks("CANCEL-9")
def a_cancel_waits_for_the_next_call(m: Any) -> None:
    def cancel(old: Any, self: Any) -> None:
        old(self)
        self.context._inner.abort()

    around(m, CoreSession, "cancel", cancel)


@breaks("STREAM-11")
def generate_trims_its_text(m: Any) -> None:
    around(m, CoreSession, "generate", lambda old, self, *a, **k: old(self, *a, **k)[:-1])
