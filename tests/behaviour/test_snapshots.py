"""A session's state goes out and comes back, or is refused with the reason."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import attrs
import pytest

import infercore as ic

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = "Once upon a time there was a baker named Mira"


def greedy(session: Any, n: int = 24) -> list[int]:
    return [t for chunk in session.decode(max_tokens=n, temperature=0) for t in chunk.tokens]


def test_restored_in_another_session(new_session: Any) -> None:
    session = new_session()
    session.ensure_prefix(PROMPT)
    session.prefill_suffix(", who lived")
    greedy(session, 5)
    snapshot = session.snapshot()
    expected = greedy(session)
    other = new_session()
    other.restore(snapshot)
    assert other.explain_context().resident_tokens == snapshot.resident_tokens
    assert other.state == "DECODED"
    assert greedy(other) == expected
    other.restore(snapshot)
    assert other.ensure_prefix(PROMPT).prefilled_tokens <= 1


def test_the_logits_come_back_with_it(new_session: Any) -> None:
    session = new_session()
    session.ensure_prefix(PROMPT)
    snapshot = session.snapshot()
    other = new_session()
    other.restore(snapshot)
    assert (other.context.logits() == session.context.logits()).all()


def test_fork_continues_apart(new_session: Any) -> None:
    for n_seq_max in (1, 3):
        session = new_session(n_seq_max=n_seq_max)
        session.ensure_prefix(PROMPT)
        twin = session.fork()
        first = greedy(session)
        twin.prefill_suffix(" and her dog")
        other = greedy(twin)
        session.ensure_prefix(PROMPT)
        assert greedy(session) == first
        twin.ensure_prefix(PROMPT)
        assert greedy(twin) == first
        session.close()
        twin.prefill_suffix(" and her dog")
        assert greedy(twin) == other
        twin.close()
        assert twin.context.closed


CHILD = """
import sys, infercore as ic
backend, model, path = sys.argv[1:]
with ic.open_session(
    model, backend=backend, n_ctx=1024, flash_attn="off", type_k="f32", type_v="f32"
) as session:
    session.load(path)
    print([t for c in session.decode(max_tokens=24, temperature=0) for t in c.tokens])
"""


def test_saved_here_and_loaded_in_another_process(
    new_session: Any, backend_name: str, pack_path: Path, tmp_path: Path
) -> None:
    session = new_session()
    session.ensure_prefix(PROMPT)
    path = tmp_path / "state"
    written = session.save(path)
    assert path.stat().st_size == written.size_bytes
    expected = greedy(session)
    command = [sys.executable, "-c", CHILD, backend_name, str(pack_path), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(expected)


WRITER = """
import sys, infercore as ic
backend, model, path = sys.argv[1:]
with ic.open_session(
    model, backend=backend, n_ctx=1024, flash_attn="off", type_k="f32", type_v="f32"
) as session:
    session.ensure_prefix("Once upon a time there was a baker named Mira")
    while True:
        session.save(path)
        print("saved", flush=True)
"""


def test_a_killed_writer_leaves_a_whole_file(
    new_session: Any, backend_name: str, pack_path: Path, tmp_path: Path
) -> None:
    path = tmp_path / "state"
    command = [sys.executable, "-c", WRITER, backend_name, str(pack_path), str(path)]
    for n_saves in (1, 4, 9):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            for _ in range(n_saves):
                assert writer.stdout.readline() == b"saved\n"
            writer.kill()
        session = new_session()
        session.load(path)
        assert len(greedy(session)) > 0


def test_damaged_state_is_refused_and_changes_nothing(new_session: Any, tmp_path: Path) -> None:
    session = new_session()
    session.ensure_prefix(PROMPT)
    path = tmp_path / "state"
    data = session.save(path).data
    session.prefill_suffix(" and")
    before = session.explain_context()
    places = (0, 9, 40, len(data) // 3, len(data) - 40, len(data) - 1)
    flipped = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in places]
    bad = [b"", b"x", data[:-1], data + b"x", data[: len(data) // 2], *flipped]
    for damaged in bad:
        path.write_bytes(damaged)
        with pytest.raises(ic.SnapshotError):
            session.load(path)
        assert session.explain_context() == before
    with pytest.raises(ic.ModelNotFoundError):
        session.load(tmp_path / "none")


def test_a_smaller_window_refuses_it(new_session: Any) -> None:
    session = new_session()
    session.ensure_prefix(PROMPT * 8)
    snapshot = session.snapshot()
    small = new_session(n_ctx=32)
    with pytest.raises(ic.ContextOverflowError) as caught:
        small.restore(snapshot)
    assert caught.value.stage == "restore"
    assert small.state == "EMPTY"


def test_another_identity_refuses_it(new_session: Any) -> None:
    session = new_session()
    session.ensure_prefix(PROMPT)
    snapshot = session.snapshot()
    other = new_session(profile_id="another")
    with pytest.raises(ic.ManifestMismatchError) as caught:
        other.restore(snapshot)
    assert caught.value.field == "profile_id"
    other_kv = new_session(type_k="f16", type_v="f16")
    with pytest.raises(ic.ManifestMismatchError) as caught:
        other_kv.restore(snapshot)
    assert caught.value.field == "runtime_digest"


def test_a_full_disk_leaves_the_old_file(
    new_session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = new_session()
    session.ensure_prefix(PROMPT)
    path = tmp_path / "state"
    session.save(path)
    old = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    session.prefill_suffix(" more")
    with pytest.raises(OSError, match="No space left"):
        session.save(path)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_snapshot(session: Any) -> None:
    with pytest.raises(ic.InvalidInputError):
        session.restore(b"bytes")


def test_stated_identity(session: Any) -> None:
    status = session.ensure_prefix(PROMPT)
    own = session.explain_context().manifest
    same = ic.PrefixInput(text=PROMPT, manifest=own)
    assert session.ensure_prefix(same).reset_reason is None
    foreign = attrs.evolve(own, model_digest="0" * 64)
    cold = session.ensure_prefix(ic.PrefixInput(text=PROMPT, manifest=foreign))
    assert (cold.reused_tokens, cold.prefilled_tokens) == (0, status.prefix_tokens)
    assert cold.reset_reason == "model_digest changed"
    assert cold.manifest_digest == status.manifest_digest
    with pytest.raises(ic.ManifestMismatchError):
        session.prefill_suffix(ic.SuffixInput(text=" x", manifest=foreign))
    with pytest.raises(ic.ManifestMismatchError):
        session.ensure_prefix(ic.PrefixInput(text=PROMPT, manifest=foreign, on_mismatch="error"))
    assert session.explain_context().resident_tokens == status.prefix_tokens
