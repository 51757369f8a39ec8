"""Wrong streams."""

from __future__ import annotations

from typing import Any

import attrs

from conformance.mutants import around, breaks, instead, nothing
from infercore.errors import InvalidInputError
from infercore.sampling.portable import PortableSampler
from infercore.session import text
from infercore.session.session import CoreSession
from infercore.session.stream import DecodeStream


def chunks(m: Any, **changes: Any) -> None:
    """Let chunks have other fields: ``field=lambda chunk: value``."""

    def advance(old: Any, self: Any) -> Any:
        chunk = old(self)
        return attrs.evolve(chunk, **{name: of(chunk) for name, of in changes.items()})

    around(m, DecodeStream, "__next__", advance)


def usage(m: Any, **changes: Any) -> None:
    """Let the usage have other fields."""

    def change(chunk: Any) -> Any:
        found = chunk.usage
        if found is None:
            return None
        return attrs.evolve(found, **{name: of(found) for name, of in changes.items()})

    chunks(m, usage=change)


def ends(m: Any, **other: str) -> None:
    """Let finish reasons be other ones."""
    chunks(m, finish_reason=lambda chunk: other.get(chunk.finish_reason, chunk.finish_reason))


def asked(m: Any, change: Any) -> None:
    """Let decodes run with other fields."""
    around(m, CoreSession, "decode", lambda old, self, c=None, **f: old(self, c, **change(f)))


def without(m: Any, name: str) -> None:
    """Let decodes ignore a field."""
    asked(m, lambda fields: {k: v for k, v in fields.items() if k != name})


@breaks("STREAM-1")
def the_last_chunk_shows_more(m: Any) -> None:
    chunks(m, text=lambda chunk: chunk.text + ("." if chunk.finish_reason else ""))


@breaks("STREAM-2")
def characters_are_broken(m: Any) -> None:
    def push(_: Any, self: Any, data: bytes, *, looks: bool = True) -> str:
        del looks
        shown: str = self._stops.push(data.decode("utf-8", "replace"))
        return shown

    around(m, text.TextAssembler, "push", push)


@breaks("STREAM-3")
def a_stop_string_over_tokens_leaks(m: Any) -> None:
    m.setattr(text, "_overlap", lambda *_: 0)


@breaks("STREAM-4")
def what_was_held_back_is_lost(m: Any) -> None:
    nothing(m, text.StopMatcher, "flush", value="")


@breaks("STREAM-5")
def stop_tokens_are_ignored(m: Any) -> None:
    without(m, "stop_tokens")


@breaks("STREAM-6")
def one_token_too_many(m: Any) -> None:
    asked(m, lambda fields: {**fields, "max_tokens": (fields.get("max_tokens") or 99) + 1})


@breaks("STREAM-7")
def a_full_window_is_a_length(m: Any) -> None:
    ends(m, context="length")


@breaks("STREAM-8", "CON-1")
def an_end_is_a_stop(m: Any) -> None:
    ends(m, eos="stop")


@breaks("STREAM-6", "CANCEL-8", "CANCEL-11")
def a_cancel_is_a_length(m: Any) -> None:
    ends(m, cancelled="length", length="cancelled")


@breaks("STREAM-9")
def a_second_decode_starts_anew(m: Any) -> None:
    def ensure(old: Any, self: Any, prefix: Any) -> Any:
        self.last = prefix
        return old(self, prefix)

    def decode(old: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state == "DECODED":
            self.ensure_prefix(self.last)
        return old(self, *args, **kwargs)

    around(m, CoreSession, "ensure_prefix", ensure)
    around(m, CoreSession, "decode", decode)


@breaks("STREAM-10", "SAMP-16")
def the_seed_is_not_told(m: Any) -> None:
    usage(m, seed=lambda _: None)


@breaks("STREAM-10")
def the_time_is_not_measured(m: Any) -> None:
    usage(m, time_to_first_token_ms=lambda _: 0.0)


@breaks("REUSE-16")
def the_whole_prompt_was_cached(m: Any) -> None:
    usage(m, cached_tokens=lambda found: found.prompt_tokens)


@breaks("REUSE-16", "REUSE-17")
def nothing_was_cached(m: Any) -> None:
    usage(m, cached_tokens=lambda _: 0)


@breaks("STREAM-12")
def control_tokens_are_shown(m: Any) -> None:
    asked(m, lambda fields: {**fields, "special_text": True})


@breaks("STREAM-13")
def a_likely_token_is_left_out(m: Any) -> None:
    around(m, PortableSampler, "last_logprobs", lambda old, self, n: old(self, n - 1))


@breaks("STREAM-14")
def closing_loses_the_last_token(m: Any) -> None:
    around(m, DecodeStream, "close", lambda _, self: self._release())


@breaks("STREAM-15")
def a_dropped_stream_is_kept_alive(m: Any) -> None:
    def decode(old: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        self.strong = old(self, *args, **kwargs)
        return self.strong

    around(m, CoreSession, "decode", decode)


@breaks("STREAM-17")
def what_a_processor_raises_is_swallowed(m: Any) -> None:
    instead(m, PortableSampler, "sample", ZeroDivisionError, lambda _: 0)


@breaks("STREAM-17", "SAMP-20")
def processors_are_ignored(m: Any) -> None:
    without(m, "processors")


@breaks("STREAM-18")
def the_end_comes_twice(m: Any) -> None:
    def advance(old: Any, self: Any) -> Any:
        try:
            self.final = old(self)
        except StopIteration:
            self.ends = self.__dict__.get("ends", 0) + 1
            if self.ends == 2:
                return self.final
            raise
        return self.final

    around(m, DecodeStream, "__next__", advance)


@breaks("LIFE-14")
def a_closed_session_ends_its_stream_quietly(m: Any) -> None:
    def advance(old: Any, self: Any) -> Any:
        if self._session.closed:
            raise StopIteration
        return old(self)

    around(m, DecodeStream, "__next__", advance)


@breaks("OVER-11")
def what_was_shifted_out_is_not_told(m: Any) -> None:
    chunks(m, shifted_out=lambda _: ())


@breaks("BAD-12")
def bad_decode_options_become_defaults(m: Any) -> None:
    old = CoreSession.decode
    instead(m, CoreSession, "decode", InvalidInputError, lambda self: old(self, max_tokens=1))


@breaks("CON-1", "CON-2", "CON-3", "CON-4", "CON-5", "CON-6", "CON-7")
def constraints_are_dropped(m: Any) -> None:
    without(m, "response_format")


@breaks("CON-5")
def a_constraint_stays(m: Any) -> None:
    kept: dict[str, Any] = {}

    def remember(fields: dict[str, Any]) -> dict[str, Any]:
        kept.update({k: v for k, v in fields.items() if k == "response_format"})
        return {**kept, **fields}

    asked(m, remember)


@breaks("CON-6")
def the_engine_s_own_sampler_is_quietly_replaced(m: Any) -> None:
    without(m, "implementation")
