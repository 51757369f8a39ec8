"""A hypothesis machine: after any calls and failures a session tells the truth."""

from __future__ import annotations

import gc
import itertools
import pathlib
import tempfile
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import infercore as ic
from infercore.testing import Faults
from infercore.testing.faults import aborted, no_room

if TYPE_CHECKING:
    from collections.abc import Callable

PIECES = ["the ", "tale ", "Mira ", "a", "é", "\U0001f600", "<s>", "<|end|>", "<|im_end|>", "x"]
texts = st.lists(st.sampled_from(PIECES), max_size=9).map("".join)
heads = st.sampled_from(["", "Once ", "Once upon the ", "Once upon the time é"])
STATES = {"EMPTY", "PREFIXED", "READY", "DECODED", "CLOSED", "FATAL"}
ERRORS: dict[str, Callable[[], BaseException]] = {
    "no room": no_room,
    "abort": aborted,
    "memory": MemoryError,
    "broken": lambda: RuntimeError("the engine broke"),
    "interrupt": KeyboardInterrupt,
}
CALLS = ["decode", "decode_one", "seq_remove", "seq_copy", "save_sequence", "load_sequence",
         "logits"]  # fmt: skip
failures = st.one_of(
    st.none(),
    st.none(),
    st.tuples(
        st.sampled_from(CALLS),
        st.sampled_from(sorted(ERRORS)),
        st.integers(1, 3),
        st.sampled_from(["nothing", "half", "all"]),
    ),
)
Failure = tuple[str, str, int, str]


def innermost(context: Any) -> Any:
    """Return the engine's own context, past guard, limits and faults."""
    while "_inner" in vars(context):
        context = vars(context)["_inner"]
    return context


def engine_tokens(context: Any, seq_id: int) -> list[int] | None:
    """Return what the engine itself holds, None where it cannot be looked into."""
    inner = innermost(context)
    if hasattr(inner, "cells"):
        positions = [position for position, _ in inner.cells]
        assert positions == list(range(len(positions)))
        return [token for _, token in inner.cells]
    if hasattr(inner, "sequences") and hasattr(inner.sequences[seq_id], "tokens"):
        cells = inner.sequences[seq_id]
        assert cells.positions.tolist() == list(range(len(cells.tokens)))
        return [int(token) for token in cells.tokens]
    return None


class SessionMachine(RuleBasedStateMachine):
    """Calls in any order; ``open_model(faults)`` and ``fields`` say on what."""

    open_model: ClassVar[Callable[[Faults], Any]]
    fields: ClassVar[dict[str, Any]] = {"n_ctx": 72, "n_batch": 8}
    with_faults: ClassVar[bool] = True
    model: ClassVar[Any] = None
    faults: ClassVar[Faults]

    @initialize()
    def begin(self) -> None:
        cls = type(self)
        if cls.model is None:
            cls.faults = Faults()
            cls.model = cls.open_model(cls.faults)
        self.faults.reset()
        self.cold_context = self.model.new_context(**self.fields)
        self.snapshot: tuple[Any, str, list[int], list[int]] | None = None
        self.twins: list[Any] = []
        self.open()

    def open(self) -> None:
        self.session = self.model.new_session(**self.fields)
        self.state, self.logical, self.prefix = "EMPTY", [], []
        self.prefix_text, self.suffix_text = "", ""

    def teardown(self) -> None:
        if not hasattr(self, "session"):
            return
        self.faults.reset()
        self.agrees_with_cold(self.session, self.base())
        for one in (self.session, self.cold_context, *self.twins):
            one.close()

    # -- what must hold ------------------------------------------------------------------------

    @invariant()
    def books_are_true(self) -> None:
        if not hasattr(self, "session"):
            return
        session, resident = self.session, self.session.resident
        assert session.state in STATES
        assert session.state == self.state
        if resident.is_paged:  # forked: a pool's context pages, so that held is not wanted
            report = session.explain_context()
            assert (report.state, report.resident_tokens) == (self.state, resident.n_wanted)
            return
        if resident._in_doubt:  # the engine did what it said that it had not: the next call looks
            return
        tokens, context = resident.tape.tokens(), session.context
        assert context.tokens(resident.seq_id) == tokens
        assert context.n_past(resident.seq_id) == context.n_resident(resident.seq_id) == len(tokens)
        held = engine_tokens(context, resident.seq_id)
        assert held is None or held == tokens
        report = session.explain_context()
        assert report.state == self.state
        parts = (report.prefix_tokens, report.suffix_tokens, report.generated_tokens)
        assert min(parts) >= 0
        assert sum(parts) == report.resident_tokens == resident.tape.logical
        assert report.resident_tokens + report.warm_tail_tokens == len(tokens)
        if self.state != "PREFIXED":
            assert resident.wanted() == self.logical
        else:
            assert resident.wanted() == self.prefix[: len(resident.wanted())]
        self.segments_cover(report)

    def segments_cover(self, report: Any) -> None:
        segments = report.manifest.segments
        assert bool(segments) == (self.state != "EMPTY")
        if segments:
            assert segments[0].kind == "stable"
            assert {segment.kind for segment in segments[1:]} <= {"volatile"}
            assert segments[-1].token_end == report.resident_tokens
            for a, b in itertools.pairwise(segments):
                assert (a.byte_end, a.token_end) == (b.byte_start, b.token_start)

    def base(self) -> list[int]:
        return self.prefix if self.state == "PREFIXED" else self.logical

    def cold_greedy(self, tokens: list[int], n: int) -> list[tuple[int, float]]:
        """Return the next tokens of a fresh context, each with its lead over the second best."""
        context, found = self.cold_context, []
        context.clear()
        context.decode(tokens)
        for _ in range(n):
            row = np.array(context.logits())
            best = int(row.argmax())
            found.append((best, float(row[best] - np.partition(row, -2)[-2])))
            if self.model.tokenizer.is_eog(best) or context.n_free() < 1:
                break
            context.decode_one(best)
        return found

    def agrees_with_cold(self, session: Any, tokens: list[int], n: int = 3) -> None:
        """Decode greedily and compare; ties within the backend's tolerance may fall either way."""
        if not tokens or len(tokens) >= self.fields["n_ctx"]:
            return
        expected = self.cold_greedy(tokens, min(n, self.fields["n_ctx"] - len(tokens)))
        got = [t for chunk in session.decode(max_tokens=n, temperature=0) for t in chunk.tokens]
        limit = 2 * session.context.tolerance
        for i, (token, lead) in enumerate(expected):
            if self.model.tokenizer.is_eog(token):
                assert got[i:] == [] or lead <= limit
                return
            if i >= len(got) or got[i] != token:
                assert lead <= limit, (got, expected)
                return

    # -- calls that may fail -------------------------------------------------------------------

    def run(self, failure: Failure | None, call: Callable[[], Any]) -> tuple[Any, bool]:
        """Call, with a failure planned; return the result and whether it succeeded."""
        if failure is not None and self.with_faults:
            name, error, at, work = failure
            if work == "half" and name != "decode":
                work = "nothing"
            self.faults.plan(name, ERRORS[error](), at=at, work=work)
        before = self.session.explain_context()
        try:
            result = call()
            if self.session.state == "FATAL":  # found out where a dropped stream ended
                self.is_fatal(self.session.gate.fatal)
                return result, False
            return result, True  # noqa: TRY300  (both ends are looked at above)
        except (ic.ContextOverflowError, ic.UnsupportedFeatureError, ic.InvalidStateError) as error:
            if error.state_after == "unchanged" and failure is None:
                assert self.session.explain_context() == before
            return error, False
        except ic.SessionFatalError as error:
            self.is_fatal(error)
            return error, False
        except (ic.InferCoreError, MemoryError, RuntimeError, KeyboardInterrupt) as error:
            assert failure is not None
            self.faults.reset()
            if self.session.state == "FATAL":
                self.is_fatal(self.session.gate.fatal)
            return error, False
        finally:
            self.faults.reset()

    def is_fatal(self, error: ic.SessionFatalError) -> None:
        for call in (lambda: self.session.ensure_prefix("x"), self.session.snapshot):
            with pytest.raises(ic.SessionFatalError) as again:
                call()
            assert again.value.cause is error.cause
        report = self.session.explain_context()
        assert (report.state, report.fatal_cause) == ("FATAL", str(error.cause))
        self.session.close()
        self.open()

    def failed(self, fallback: str) -> None:
        """After a failed prefill: unchanged, or fallen back."""
        if self.state == "EMPTY" or self.session.state == self.state != fallback:
            return
        assert self.session.state in (self.state, fallback)
        self.state = self.session.state
        if self.state == "EMPTY":
            self.logical = []

    @rule(head=heads, tail=texts, failure=failures)
    def ensure_prefix(self, head: str, tail: str, failure: Failure | None) -> None:
        text = head + tail
        session = self.session
        ids = self.model.tokenizer.encode(text)
        status, done = self.run(failure, lambda: session.ensure_prefix(text))
        interrupted = isinstance(status, KeyboardInterrupt) and session.parts.prefix_ids == ids
        if not done and not (interrupted and session is self.session):
            self.failed("EMPTY")
            return
        self.state, self.prefix_text, self.suffix_text = "PREFIXED", text, ""
        self.prefix = self.logical = ids
        if not done:  # interrupted when the prefix was in place
            self.state = session.state
            return
        assert status.reused_tokens + status.prefilled_tokens == status.prefix_tokens == len(ids)
        assert status.resident_tokens == len(ids)
        assert status.available_tokens == session.explain_context().available_tokens

    @precondition(lambda self: self.state != "EMPTY")
    @rule(text=texts, boundary=st.sampled_from(["joint", "split"]), failure=failures)
    def replace_suffix(self, text: str, boundary: str, failure: Failure | None) -> None:
        session, encode = self.session, self.model.tokenizer.encode
        given = ic.SuffixInput(text=text, boundary=boundary)
        status, done = self.run(failure, lambda: session.prefill_suffix(given))
        whole = encode(self.prefix_text + text)
        apart = [*encode(self.prefix_text), *encode(text, add_special=False)]
        target = whole if boundary == "joint" else apart
        if not done:
            in_place = isinstance(status, KeyboardInterrupt) and session.state == "READY"
            if in_place and session.resident.wanted() == target:
                self.state, self.logical = "READY", target
            else:
                self.failed("PREFIXED")
            return
        self.state, self.logical = "READY", target
        assert status.reused_tokens + status.prefilled_tokens == status.suffix_tokens
        assert status.prefix_tokens + status.suffix_tokens == len(self.logical)

    @precondition(lambda self: self.state == "DECODED" and self.session.parts.n_generated)
    @rule(text=texts, failure=failures)
    def append_suffix(self, text: str, failure: Failure | None) -> None:
        session, ended_by = self.session, self.session.parts.ended_by
        ids = [] if ended_by is None else [ended_by]
        ids += self.model.tokenizer.encode(text, add_special=False)
        given = ic.SuffixInput(text=text, mode="append")
        status, done = self.run(failure, lambda: session.prefill_suffix(given))
        if isinstance(status, KeyboardInterrupt) and session.state == "READY":
            self.state, self.logical = "READY", [*self.logical, *ids]
        if not done:
            return
        self.state, self.logical = "READY", [*self.logical, *ids]
        assert status.reused_tokens + status.prefilled_tokens == len(ids)

    @precondition(lambda self: self.base())
    @rule(
        n=st.integers(1, 8),
        stop_at=st.integers(0, 4),
        how=st.sampled_from(["whole", "close", "drop", "cancel", "cancel"]),
        failure=failures,
    )
    def decode(self, n: int, stop_at: int, how: str, failure: Failure | None) -> None:
        base, shown, session = self.base(), [], self.session

        def consume() -> None:
            stream = session.decode(max_tokens=n, temperature=0)
            for i, chunk in enumerate(stream):
                shown.extend(chunk.tokens)
                if i == stop_at and how == "cancel":
                    session.cancel()
                elif i == stop_at and how != "whole":
                    break
            if how == "close":
                stream.close()
            del stream
            gc.collect(0)

        _, done = self.run(failure, consume)
        unchanged = not done and session.state == self.state != "DECODED"
        if session is not self.session or unchanged:
            return
        wanted = self.session.resident.wanted()
        if self.session.state == "DECODED":
            assert wanted[: len(base) + len(shown)] == [*base, *shown]
            assert not done or how == "cancel" or wanted == [*base, *shown]
            self.state, self.logical = "DECODED", wanted

    @precondition(lambda self: self.session.context.capabilities.sequence_state)
    @rule(failure=failures)
    def take_snapshot(self, failure: Failure | None) -> None:
        snapshot, done = self.run(failure, lambda: self.session.snapshot())
        if done:
            self.snapshot = (snapshot, self.state, list(self.logical), list(self.prefix))
            self.snapshot_text = self.prefix_text

    @precondition(lambda self: self.snapshot is not None)
    @rule(failure=failures, through_file=st.booleans())
    def restore(self, failure: Failure | None, through_file: bool) -> None:
        snapshot, state, logical, prefix = self.snapshot
        session = self.session

        def call() -> None:
            if not through_file:
                session.restore(snapshot)
                return
            with tempfile.TemporaryDirectory() as folder:
                path = pathlib.Path(folder, "state")
                path.write_bytes(snapshot.data)
                session.load(path)

        _, done = self.run(failure, call)
        if done:
            self.state, self.logical, self.prefix = state, list(logical), list(prefix)
            self.prefix_text = self.snapshot_text
        elif session is self.session:
            self.failed("EMPTY")

    @rule(failure=failures)
    def fork(self, failure: Failure | None) -> None:
        twin, done = self.run(failure, lambda: self.session.fork())
        if not done:
            return
        self.agrees_with_cold(twin, self.base(), 2)
        if self.session.resident.is_paged and len(self.twins) < 1:
            self.twins.append(twin)
        else:
            twin.close()

    @precondition(lambda self: self.twins)
    @rule()
    def use_and_close_twin(self) -> None:
        twin = self.twins.pop()
        twin.ensure_prefix("Once upon")
        self.agrees_with_cold(twin, self.model.tokenizer.encode("Once upon"), 2)
        twin.close()

    @rule()
    def out_of_order(self) -> None:
        if self.state == "EMPTY":
            for call in (lambda: self.session.prefill_suffix("x"), lambda: self.session.decode()):
                _, done = self.run(None, call)
                assert not done

    @rule()
    def go_on_as_cold(self) -> None:
        base = self.base()
        if not base or len(base) >= self.fields["n_ctx"]:
            return
        self.agrees_with_cold(self.session, base)
        self.state, self.logical = "DECODED", self.session.resident.wanted()
