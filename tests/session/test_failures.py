"""What a failure in the middle of a call leaves, one by one."""

from __future__ import annotations

import linecache
import sys
from typing import TYPE_CHECKING, Any

import pytest

import infercore as ic
from infercore.testing.faults import aborted, no_room

if TYPE_CHECKING:
    from collections.abc import Callable

TEXT = "Once upon the time there was a baker"


def test_a_token_shown_before_a_failure_is_made_good(
    toy: Any, faults: Any, greedy: Any, cold_greedy: Any
) -> None:
    session = toy.new_session(n_ctx=128)
    session.ensure_prefix(TEXT)
    stream = session.decode(max_tokens=8, temperature=0)
    shown = list(next(stream).tokens)
    faults.plan("decode", no_room())
    with pytest.raises(ic.ContextOverflowError) as caught:
        list(stream)
    assert caught.value.stage == "engine"
    assert shown + greedy(session, 8 - len(shown)) == cold_greedy(toy, TEXT)


def test_an_interruption_that_the_context_does_not_survive_is_fatal_at_once(
    reference: Any, faults: Any
) -> None:
    session = reference.new_session(n_ctx=32, n_seq_max=2, kv_unified=True, overflow="shift")
    session.ensure_prefix("Once")
    faults.plan("seq_shift", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        for _ in session.decode(max_tokens=64, temperature=0, ignore_eos=True):
            pass
    assert session.state == "FATAL"
    with pytest.raises(ic.SessionFatalError) as caught:
        session.decode()
    assert isinstance(caught.value.cause, KeyboardInterrupt)
    session.close()


def test_a_prompt_that_samples_moved_and_cannot_be_restored_is_evaluated_anew(
    reference: Any, faults: Any
) -> None:
    """Tokens that repeat look as if they were still those of the prompt."""
    found = []
    for fails in (False, True):
        session = reference.new_session(n_ctx=40, overflow="shift")
        session.ensure_prefix([reference.tokenizer.bos, 300])
        session.prefill_suffix([300] * 34)
        if fails:
            faults.plan("load_sequence", KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                session.sample_many(2, max_tokens=20, ignore_eos=True)
        chunks = list(session.decode(max_tokens=2, temperature=0, logprobs=0))
        found.append(chunks[0].logprobs[0].logprob)
        assert session.explain_context().resident_tokens == 38
    assert found[0] == pytest.approx(found[1], abs=1e-4)


@pytest.mark.parametrize("work", ["nothing", "all"])
def test_an_interrupted_truncation_is_survived(
    toy: Any, faults: Any, greedy: Any, cold_greedy: Any, work: str
) -> None:
    session = toy.new_session(n_ctx=128)
    session.ensure_prefix(TEXT)
    faults.plan("seq_remove", KeyboardInterrupt(), work=work)
    with pytest.raises(KeyboardInterrupt):
        session.ensure_prefix("Once more")
    session.ensure_prefix("Once more")
    assert greedy(session) == cold_greedy(toy, "Once more")
    session.close()


def test_a_context_failed_by_another_session_fails_this_one(reference: Any, faults: Any) -> None:
    session = reference.new_session(n_ctx=256, n_seq_max=2, kv_unified=True)
    session.ensure_prefix(TEXT)
    twin = session.fork()
    faults.plan("decode", RuntimeError("broken"))
    with pytest.raises(ic.SessionFatalError):
        twin.ensure_prefix("Another text")
    with pytest.raises(ic.SessionFatalError, match="broken"):
        session.ensure_prefix("Another text")
    assert session.state == "FATAL"
    twin.close()
    session.close()


def test_a_cold_start_that_fails_leaves_an_empty_session(toy: Any, faults: Any) -> None:
    session = toy.new_session(n_ctx=128)
    session.ensure_prefix(TEXT)
    session.prefill_suffix(" x")
    foreign = ic.ContextManifest(model_digest="0" * 64)
    faults.plan("decode", aborted())
    with pytest.raises(ic.DecodeAbortedError):
        session.ensure_prefix(ic.PrefixInput(text=TEXT, manifest=foreign))
    assert session.state == "EMPTY"
    assert session.explain_context().prefix_tokens == 0


def test_a_checkpoint_that_cannot_be_saved_costs_only_time(
    recurrent: Any, faults: Any, greedy: Any, cold_greedy: Any
) -> None:
    session = recurrent.new_session(n_ctx=256)
    faults.plan("save_sequence", MemoryError(), times=9)
    session.ensure_prefix(TEXT)
    session.prefill_suffix(" one")
    status = session.prefill_suffix(" two")
    assert status.reused_tokens + status.prefilled_tokens == status.suffix_tokens
    assert status.reevaluated_tokens == status.prefix_tokens
    assert greedy(session) == cold_greedy(recurrent, TEXT + " two")


def test_a_checkpoint_that_is_refused_is_evaluated_anew(
    recurrent: Any, faults: Any, greedy: Any, cold_greedy: Any
) -> None:
    session = recurrent.new_session(n_ctx=256)
    session.ensure_prefix(TEXT)
    session.prefill_suffix(" one")
    faults.plan("load_sequence", ValueError("no"))
    session.prefill_suffix(" two")
    assert session.context.tokens() == recurrent.tokenizer.encode(TEXT + " two")
    assert greedy(session) == cold_greedy(recurrent, TEXT + " two")


def test_a_checkpoint_is_gone_back_to(recurrent: Any) -> None:
    session = recurrent.new_session(n_ctx=256)
    n = session.ensure_prefix(TEXT).prefix_tokens
    session.prefill_suffix(" one")
    before = session.context.perf().prefill_tokens
    status = session.prefill_suffix(" two three")
    assert status.reevaluated_tokens == 0
    assert session.context.perf().prefill_tokens - before == status.prefilled_tokens
    assert status.prefix_tokens == n


def test_a_snapshot_that_the_engine_refuses_leaves_an_empty_session(
    reference: Any, faults: Any, greedy: Any
) -> None:
    session = reference.new_session(n_ctx=128)
    session.ensure_prefix(TEXT)
    snapshot = session.snapshot()
    faults.plan("load_sequence", ValueError("no"))
    with pytest.raises(ic.SnapshotError):
        session.restore(snapshot)
    assert session.state == "EMPTY"
    assert session.explain_context().resident_tokens == 0
    session.restore(snapshot)
    assert greedy(session, 2)


def test_a_restore_that_is_interrupted_leaves_the_session_as_it_was(
    reference: Any, faults: Any, greedy: Any
) -> None:
    session = reference.new_session(n_ctx=128)
    session.ensure_prefix(TEXT)
    snapshot = session.snapshot()
    wanted = greedy(session, 2)
    session.ensure_prefix(TEXT)
    faults.plan("load_sequence", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        session.restore(snapshot)
    assert session.state == "PREFIXED"
    assert session.snapshot().manifest == snapshot.manifest
    assert greedy(session, 2) == wanted


@pytest.mark.parametrize("n_seq_max", [1, 2])
def test_a_fork_that_fails_leaks_nothing(reference: Any, faults: Any, n_seq_max: int) -> None:
    session = reference.new_session(n_ctx=128, n_seq_max=n_seq_max, kv_unified=True)
    session.ensure_prefix(TEXT)
    for call in ("seq_copy", "save_sequence"):
        faults.plan(call, ic.UnsupportedFeatureError(feature="it"), times=2)
        for _ in range(2):
            if (call == "seq_copy") == (n_seq_max == 2):
                with pytest.raises(ic.UnsupportedFeatureError):
                    session.fork()
        faults.reset()
    twin = session.fork()
    assert session.context.is_paged if n_seq_max == 2 else twin.context is not session.context
    twin.close()
    session.close()
    assert session.context.closed


def test_a_processor_that_raises_leaves_a_session_that_goes_on(
    reference: Any, greedy: Any, cold_greedy: Any
) -> None:
    class Raising:
        def __init__(self) -> None:
            self.left = 3

        def apply(self, logits: Any) -> Any:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
            return logits

    session = reference.new_session(n_ctx=128)
    session.ensure_prefix(TEXT)
    shown: list[int] = []
    stream = session.decode(max_tokens=8, temperature=0, processors=[Raising()])
    shown += next(stream).tokens
    shown += next(stream).tokens
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert session.context.tokens()[session.explain_context().prefix_tokens :] == shown
    assert shown + greedy(session, 8 - len(shown)) == cold_greedy(reference, TEXT)


NO_SIGNAL_COMES = ("with ", "try:")  # a gate is left by C code


class InterruptAt:
    """Raises KeyboardInterrupt at the k-th line that runs in the session's own modules."""

    def __init__(self, k: int, within: tuple[str, ...]) -> None:
        self.left = k
        self.place = ""
        self.within = within

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if not any(part in name for part in self.within):
            return None
        line = linecache.getline(name, frame.f_lineno).strip()
        if event == "line" and not line.startswith(NO_SIGNAL_COMES):
            self.left -= 1
            self.place = f"{name}:{frame.f_lineno}"
            if self.left == 0:
                raise KeyboardInterrupt
        return self

    def during(self, work: Callable[[], Any]) -> bool:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            work()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False


MODULES = ("session/resident.py", "session/true_tape.py", "session/tape.py", "session/prefill.py",
           "session/stream.py", "session/generation.py", "engine/cells.py")  # fmt: skip


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("part", ["prefix", "suffix", "decode"])
def test_an_interruption_at_every_line(toy: Any, greedy: Any, cold_greedy: Any, part: str) -> None:
    texts = {"prefix": "Once more", "suffix": TEXT + " x", "decode": TEXT + " y"}
    expected = cold_greedy(toy, texts[part], 4)
    calls: dict[str, Callable[[Any], Any]] = {
        "prefix": lambda s: s.ensure_prefix(texts["prefix"]),
        "suffix": lambda s: s.prefill_suffix(" x"),
        "decode": lambda s: greedy(s, 2),
    }
    for k in range(1, 2000, 3):
        session = toy.new_session(n_ctx=128, n_batch=8)
        session.ensure_prefix(TEXT)
        session.prefill_suffix(" y")
        interrupt = InterruptAt(k, MODULES)
        interrupted = interrupt.during(lambda s=session: calls[part](s))
        if session.state != "FATAL":
            if part == "prefix":
                session.ensure_prefix(texts[part])
            elif part == "suffix":
                again(session, TEXT, " x")
            if part != "decode":
                assert greedy(session, 4) == expected, interrupt.place
            else:
                already = session.resident.wanted()[len(toy.tokenizer.encode(TEXT + " y")) :]
                assert (already + greedy(session, 4))[:4] == expected[:4], interrupt.place
            held = [token for _, token in vars(vars(session.context)["_inner"])["_inner"].cells]
            assert held == session.context.tokens() == session.resident.tape.tokens()
        session.close()
        if not interrupted:
            return
    pytest.fail("the call has more lines than were tried")


def again(session: Any, prefix: str, suffix: str) -> None:
    session.ensure_prefix(prefix)
    session.prefill_suffix(suffix)
