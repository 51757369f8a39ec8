"""Saved sessions with damage and right checksums: refused, or taken; the session lives on."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import infercore as ic
from fuzzing import Wrong
from fuzzing.states import MODELS, changed

if TYPE_CHECKING:
    from random import Random

LIMIT_S = 30.0
BATCH = 200
PROMPT, OTHER = "Once upon a time there was a baker named Mira", "The dog ran home. It was"


class Snapshots:
    """A session for each engine, the file that it saved, and a text that it makes."""

    def __init__(self) -> None:
        import infercore_models  # noqa: PLC0415

        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name) / "session.snap"
        self._held: list[tuple[Any, bytes, str]] = []
        for backend, kind in MODELS.items():
            path = infercore_models.path("storyteller", kind)
            model = ic.load_model(path, backend=backend, check_in_child=False)
            session = model.new_session(
                n_ctx=256, precision="accurate", n_threads=1, n_threads_batch=1
            )
            text = self._text(session)
            session.ensure_prefix(PROMPT)
            session.prefill_suffix(", who lived")
            list(session.decode(max_tokens=4, temperature=0))
            session.save(self._path)
            self._held.append((session, self._path.read_bytes(), text))

    def case(self, random: Random) -> str:
        """Load a changed file, use the session, and compare what it makes of another text."""
        session, data, text = random.choice(self._held)
        self._path.write_bytes(changed(data, random))
        try:
            session.load(self._path)
            self._use(session)
            return "taken"
        finally:
            session.context.clear()
            if self._text(session) != text:
                raise Wrong("another text than before")

    @staticmethod
    def _use(session: Any) -> None:
        session.explain_context()
        list(session.decode(max_tokens=2, temperature=0))
        session.ensure_prefix(PROMPT)
        session.prefill_suffix(", a cook")
        list(session.decode(max_tokens=2, temperature=0))

    @staticmethod
    def _text(session: Any) -> str:
        session.ensure_prefix(OTHER)
        return "".join(chunk.text for chunk in session.decode(max_tokens=8, temperature=0))


def open_target() -> Snapshots:
    """Return the target."""
    return Snapshots()
