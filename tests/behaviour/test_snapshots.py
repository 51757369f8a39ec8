"""A session's file is whole or the old one, whatever ends its writing."""

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


@pytest.mark.parametrize("field", ["model_digest", "runtime_digest", "profile_id", "adapters"])
def test_a_snapshot_whose_identity_was_stated_otherwise_is_refused(
    session: Any, field: str
) -> None:
    session.ensure_prefix(PROMPT)
    snapshot = session.snapshot()
    other: Any = ("0" * 64,) if field == "adapters" else "0" * 64
    foreign = attrs.evolve(snapshot.manifest, **{field: other})
    session.prefill_suffix(" who")
    before = session.explain_context()
    with pytest.raises(ic.ManifestMismatchError) as caught:
        session.restore(attrs.evolve(snapshot, manifest=foreign))
    error = caught.value
    assert (error.field, error.expected) == (field, other)
    assert error.actual == getattr(before.manifest, field)
    assert session.explain_context() == before
    unstated = ic.ContextManifest(stable_byte_hash="of another text")
    session.restore(attrs.evolve(snapshot, manifest=unstated))
    assert session.explain_context().resident_tokens == snapshot.resident_tokens


@pytest.mark.parametrize(
    ("field", "value"), [("manifest", None), ("data", "text"), ("resident_tokens", -1)]
)
def test_a_snapshot_is_made_of_what_it_says(field: str, value: object) -> None:
    fields: dict[str, Any] = {
        "manifest": ic.ContextManifest(), "data": b"", "resident_tokens": 0, field: value
    }  # fmt: skip
    with pytest.raises(ic.InvalidInputError) as caught:
        ic.Snapshot(**fields)
    assert caught.value.field == field
