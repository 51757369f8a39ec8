"""A session's state as a value, a file and a branch; state that no engine saved."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from infercore.conformance import children
from infercore.conformance.expect import equal, raises, that
from infercore.conformance.law import law
from infercore.conformance.laws.state import damaged
from infercore.conformance.rig import greedy
from infercore.engine import blob
from infercore.errors import (
    ContextOverflowError,
    InvalidInputError,
    ManifestMismatchError,
    ModelNotFoundError,
    SnapshotError,
)

if TYPE_CHECKING:
    from typing import Any

    from infercore.conformance.rig import Rig


def _session(rig: Rig, n: int = 12, **fields: Any) -> tuple[Any, str]:
    session, text = rig.session(**fields), rig.passage(n)
    session.ensure_prefix(text)
    return session, text


@law("STATE-13", tier="session", needs="sequence_state")
def check_snapshot_in_another_session(rig: Rig) -> None:
    """A snapshot restored in another session continues as the first one does."""
    session, text = _session(rig)
    session.prefill_suffix(" and then")
    made = greedy(session, 4)
    snapshot = session.snapshot()
    other = rig.session()
    other.ensure_prefix(rig.passage(5))
    other.restore(snapshot)
    report = other.explain_context()
    equal((other.state, report.resident_tokens), ("DECODED", snapshot.resident_tokens), "restored")
    ids = rig.tokenizer.encode(text + " and then") + made
    equal(snapshot.resident_tokens, len(ids), "resident tokens of the snapshot")
    rig.follows(ids, greedy(other, 6), "the restored session")


@law("STATE-14", tier="session", needs="sequence_state")
def check_restored_prefix_is_warm(rig: Rig) -> None:
    """After a restore the prefix is resident: asking for it evaluates one token at most."""
    session, text = _session(rig)
    snapshot = session.snapshot()
    other = rig.session()
    other.restore(snapshot)
    status = other.ensure_prefix(text)
    that(status.prefilled_tokens <= 1, f"{status.prefilled_tokens} tokens were evaluated again")


@law("STATE-15", tier="session", needs="sequence_state")
def check_back_to_a_snapshot(rig: Rig) -> None:
    """A session can go back to its own snapshot any number of times."""
    session, text = _session(rig)
    snapshot = session.snapshot()
    before = session.explain_context()
    for _ in range(2):
        session.prefill_suffix(" " + rig.passage(6))
        greedy(session, 3)
        session.restore(snapshot)
        equal(session.explain_context(), before, "the report after going back")
        rig.follows(rig.tokenizer.encode(text), greedy(session, 4), "after going back")


@law("STATE-16", tier="session", needs="sequence_state")
def check_file_goes_out_and_comes_back(rig: Rig) -> None:
    """Loading a file restores the session that was saved to it."""
    session, text = _session(rig)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state"
        written = session.save(path)
        equal(path.stat().st_size, written.size_bytes, "bytes in the file")
        other = rig.session()
        read = other.load(path)
        raises(ModelNotFoundError, lambda: other.load(Path(folder) / "none"), "no file")
    equal(read.resident_tokens, written.resident_tokens, "resident tokens")
    rig.follows(rig.tokenizer.encode(text), greedy(other, 5), "the loaded session")


@law("STATE-17", tier="session", needs="sequence_state")
def check_damaged_snapshot(rig: Rig) -> None:
    """A damaged snapshot raises SnapshotError and changes nothing."""
    session, text = _session(rig)
    snapshot = session.snapshot()
    before = session.explain_context()
    for data in damaged(snapshot.data):
        bad = attrs.evolve(snapshot, data=data)
        raises(SnapshotError, lambda s=bad: session.restore(s), "a damaged snapshot")
        equal(session.explain_context(), before, "the report afterwards")
    raises(InvalidInputError, lambda: session.restore(b"bytes"), "bytes as a snapshot")
    rig.follows(rig.tokenizer.encode(text), greedy(session, 3), "after damaged snapshots")


@law("STATE-18", tier="session", needs="sequence_state")
def check_snapshot_that_does_not_fit(rig: Rig) -> None:
    """A snapshot longer than the window raises ContextOverflowError, and changes nothing."""
    session, _ = _session(rig, 50)
    snapshot = session.snapshot()
    small = rig.session(n_ctx=32)
    error = raises(ContextOverflowError, lambda: small.restore(snapshot), "a long snapshot")
    equal((error.stage, small.state), ("restore", "EMPTY"), "stage, and state afterwards")


@law("STATE-19", tier="session", needs="sequence_state")
def check_snapshot_of_another_identity(rig: Rig) -> None:
    """A snapshot of another identity raises ManifestMismatchError."""
    session, _ = _session(rig)
    snapshot = session.snapshot()
    other = rig.session(profile_id="another")
    error = raises(ManifestMismatchError, lambda: other.restore(snapshot), "another profile")
    equal((error.field, other.state), ("profile_id", "EMPTY"), "field, and state afterwards")


@law("STATE-20", tier="session", needs="sequence_state")
def check_snapshot_changes_nothing(rig: Rig) -> None:
    """Taking a snapshot changes nothing."""
    session, text = _session(rig)
    before = session.explain_context()
    snapshot = session.snapshot()
    equal(session.explain_context(), before, "the report afterwards")
    equal(snapshot.size_bytes, len(snapshot.data), "size_bytes")
    rig.follows(rig.tokenizer.encode(text), greedy(session, 4), "after a snapshot")


@law("STATE-21", tier="session")
def check_fork(rig: Rig) -> None:
    """A fork and its source continue independently, and each works without the other."""
    session, text = _session(rig)
    twin = rig.opened(session.fork())
    reports = [twin.explain_context(), session.explain_context()]
    if rig.in_pool:  # where the cells of both may be had one after the other
        reports = [attrs.evolve(report, held_tokens=0) for report in reports]
    equal(reports[0], reports[1], "the reports of both")
    prompt = rig.tokenizer.encode(text)
    first = greedy(session, 5)
    rig.follows(prompt, first, "the source")
    twin.prefill_suffix(" and the dog")
    rig.follows(rig.tokenizer.encode(text + " and the dog"), greedy(twin, 4), "the fork")
    equal(session.explain_context().generated_tokens, 5, "generated tokens of the source")
    session.close()
    twin.ensure_prefix(text)
    rig.follows(prompt, greedy(twin, 4), "the fork, alone")


@law("STATE-22", tier="session", needs="kv_copy")
def check_fork_into_a_free_sequence(rig: Rig) -> None:
    """Where the context has a free sequence, a fork evaluates nothing, and goes its own way."""
    session, text = _session(rig, n_seq_max=3, n_ctx=3 * rig.n_ctx)
    twin = rig.opened(session.fork())
    n = len(rig.tokenizer.encode(text))
    status = twin.ensure_prefix(text)
    equal((status.reused_tokens, status.prefilled_tokens), (n, 0), "the fork's prefix")
    twin.prefill_suffix(" and the dog")
    greedy(twin, 3)
    rig.follows(rig.tokenizer.encode(text), greedy(session, 5), "the source")
    session.close()
    rig.follows(
        rig.tokenizer.encode(text + " and the dog"),
        _again(twin, " and the dog", 4),
        "the fork, alone",
    )


def _again(session: Any, suffix: str, n: int) -> list[int]:
    session.prefill_suffix(suffix)
    return greedy(session, n)


_CHILD = """
with rig.session() as session:
    session.load(arguments[0])
    chunks = session.decode(max_tokens=6, temperature=0, ignore_eos=True)
    print([token for chunk in chunks for token in chunk.tokens])
"""


@law("STATE-23", tier="process", needs="sequence_state")
def check_file_in_another_process(rig: Rig) -> None:
    """A session saved here continues in another process."""
    session, text = _session(rig)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "state")
        session.save(path)
        shown = children.run(rig, _CHILD, path)
    tokens = [int(part) for part in shown.strip().strip("[]").split(",")]
    equal(len(tokens), 6, "tokens of the other process")
    rig.follows(rig.tokenizer.encode(text), tokens, "the other process")


@law("STATE-32", needs="sequence_state", since="1.2")
def check_a_payload_that_is_not_the_engine_s(rig: Rig) -> None:
    """State whose payload is cut or senseless raises SnapshotError, and leaves an empty context.

    With right checksums: the payload is what the backend saved, which the core cannot judge. The
    context goes on.
    """
    tokens = rig.tokens(5)
    expected = rig.cold(tokens)
    context = rig.context()
    context.decode(rig.tokens(20))
    ways: list[tuple[bytes, Any]] = [(context.save_sequence(0), partial(context.load_sequence, 0))]
    if context.capabilities.state:
        ways.append((context.save_state(), context.load_state))
    for data, load in ways:
        header, payload, row = blob.unpack(data)
        wrongs: dict[str, bytes | memoryview] = {
            "no payload": b"",
            "a payload without its last byte": payload[:-1],
            "half a payload": payload[: len(payload) // 2],
            "a payload of ones": b"\xff" * len(payload),
        }
        for what, wrong in wrongs.items():
            packed = blob.pack(header, wrong, row)
            error = raises(SnapshotError, partial(load, packed), what)
            equal(error.state_after, "cleared", f"{what}: the state the error tells")
            held = context.n_past(), context.tokens(), context.n_outputs
            equal(held, (0, [], 0), f"{what}: n_past, tokens and rows afterwards")
            context.decode(tokens)
            rig.near(context.logits(), expected, f"{what}: logits of what came next")


@law("STATE-33", needs="sequence_state", since="1.2")
def check_saved_state_is_of_its_text_alone(rig: Rig) -> None:
    """What is saved of a text has the same bytes whatever the context held, or saved, before it.

    A context restored from `save_state` continues the text, too.
    """
    tokens, before = rig.tokens(9), rig.tokens(90)
    as_long = [token for token in before if token not in tokens[:1]][:9]
    other, saved = rig.context(), []
    for held in ([], before, as_long, [*tokens[:5], *as_long[5:]], [*as_long[:5], *tokens[5:]]):
        context, what = rig.context(), f"where {len(held)} other tokens stood before"
        context.decode(held)
        context.save_sequence(0)
        if context.capabilities.state:
            context.save_state()
        context.seq_remove(0)
        context.decode(tokens)
        saved.append(context.save_sequence(0))
        equal(len(saved[-1]), len(saved[0]), f"bytes saved {what}")
        n = sum(a != b for a, b in zip(saved[0], saved[-1], strict=True))
        equal(n, 0, f"bytes that differ {what}")
        if context.capabilities.state:
            other.load_state(context.save_state())
            other.decode_one(before[0])
            rig.near(other.logits(), rig.cold([*tokens, before[0]]), f"whole state, {what}")
