"""Wrong saving of sessions, and wrong branches."""

from __future__ import annotations

import pathlib
from typing import Any

from conformance.mutants import around, breaks, nothing, told
from infercore.session.session import CoreSession
from infercore.values.manifest import ContextManifest


@breaks("STATE-13")
def a_snapshot_tells_a_false_size(m: Any) -> None:
    told(m, CoreSession, "snapshot", resident_tokens=lambda s: s.resident_tokens - 1)


@breaks("STATE-13", "STATE-14", "STATE-15", "STATE-17")
def a_restore_does_nothing(m: Any) -> None:
    nothing(m, CoreSession, "restore")


@breaks("STATE-16")
def a_file_is_cut_short(m: Any) -> None:
    def save(old: Any, self: Any, path: Any) -> Any:
        snapshot = old(self, path)
        file = pathlib.Path(path)
        file.write_bytes(file.read_bytes()[:-1])
        return snapshot

    around(m, CoreSession, "save", save)


@breaks("STATE-19", "REUSE-12", "REUSE-13")
def every_identity_is_alike(m: Any) -> None:
    nothing(m, ContextManifest, "mismatch")


@breaks("STATE-20")
def a_snapshot_empties_the_context(m: Any) -> None:
    def snapshot(old: Any, self: Any) -> Any:
        taken = old(self)
        self.prefill_suffix(" x")
        return taken

    around(m, CoreSession, "snapshot", snapshot)


@breaks("STATE-21", "STATE-22")
def a_fork_is_the_session_itself(m: Any) -> None:
    m.setattr(CoreSession, "fork", lambda self: self)


@breaks("STATE-21", "STATE-22")
def a_fork_starts_cold(m: Any) -> None:
    m.setattr(CoreSession, "fork", lambda self: self.model.new_session(n_ctx=256))
