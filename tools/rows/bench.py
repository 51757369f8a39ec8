"""What a row runs on (one engine with the pack's model), and how a row ends."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import infercore as ic
import infercore_models

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

FORMATS = {"llamacpp": "gguf-f32", "openvino": "openvino"}
EXACT = {"precision": "accurate", "flash_attn": "off", "type_k": "f32", "type_v": "f32"}
SCHEMA = {
    "type": "object",
    "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["days"],
    "additionalProperties": False,
}
STORY = "Once upon a time there was a baker named Mira"


class Row(NamedTuple):
    """A statement of another program, its name here, and what asserts it."""

    there: str
    here: str
    check: Callable[[Any], None]


class Section:
    """The rows of one source, in the order in which they are defined."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.rows: list[Row] = []

    def row(self, there: str, here: str) -> Callable[[Any], Any]:
        """Add the decorated assertion as a row; one may serve several."""

        def add(check: Any) -> Any:
            self.rows.append(Row(there, here, check))
            return check

        return add


class Refused(Exception):  # noqa: N818  (an outcome, not a fault)
    """A refusal that is right on every engine, after the row has seen that it is typed."""


class Bench:
    """One engine: its model, and contexts and sessions that end with the row."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.path = self.pack("storyteller")
        self.model = ic.load_model(self.path, backend=backend)
        self.golden = infercore_models.golden("storyteller")
        self.tokens = list(self.golden.prompts[1].tokens)
        threads = {"n_threads": 1, "n_threads_batch": 1} if backend == "llamacpp" else {}
        self.exact: dict[str, Any] = {**EXACT, **threads}
        self.n_cores = min(2, len(os.sched_getaffinity(0)))
        # what attention with a mask needs: OpenVINO's paged form has none
        options = {"form": "stateful"} if backend == "openvino" else {}
        self.masked: dict[str, Any] = {"backend_options": options}
        self._opened = contextlib.ExitStack()
        self._plain = self.last_row()

    def pack(self, name: str) -> Path:
        """Return a model of the pack in the engine's format."""
        kinds = infercore_models.names()[name]
        if FORMATS[self.backend] not in kinds:
            raise Refused(f"the pack has no {name} model in its format")
        return Path(infercore_models.path(name, FORMATS[self.backend]))

    def open(self, thing: Any) -> Any:
        """Close ``thing`` after the row."""
        return self._opened.enter_context(thing)

    def context(self, **fields: Any) -> Any:
        """Return a context with exact arithmetic and a window of 256."""
        return self.open(self.model.new_context(**{**self.exact, "n_ctx": 256, **fields}))

    def held(self, **fields: Any) -> Any:
        """Return a context that holds the golden prompt."""
        context = self.context(**fields)
        context.decode(self.tokens)
        return context

    def last_row(self, **fields: Any) -> Any:
        """Return the logits after the golden prompt, copied."""
        with self.model.new_context(**{**self.exact, "n_ctx": 256, **fields}) as context:
            context.decode(self.tokens)
            return context.logits().copy()

    def session(self, text: str = STORY, **fields: Any) -> Any:
        """Return a session that holds ``text``."""
        session = self.open(self.model.new_session(**{**self.exact, "n_ctx": 256, **fields}))
        if text:
            session.ensure_prefix(text)
        return session

    def pool(self, **fields: Any) -> Any:
        """Return a pool of small windows."""
        return self.open(self.model.new_pool(**{**self.exact, "n_ctx": 128, **fields}))

    def end_row(self) -> None:
        """Close what the row opened."""
        self._opened.close()

    def check_unharmed(self) -> None:
        """Raise where a refusal changed what the model computes."""
        if not np.array_equal(self.last_row(), self._plain):
            raise AssertionError("the model computes otherwise after a refusal")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end_row()
        self.model.close()


def outcome(row: Row, bench: Bench) -> str:
    """Return "holds", or "refused" with the reason; raise what the row finds wrong."""
    try:
        row.check(bench)
    except ic.UnsupportedFeatureError as error:
        bench.end_row()
        bench.check_unharmed()
        reason = str(error).partition(f"on backend {bench.backend!r}; ")[2]
        return f"refused: {reason}" if reason else f"refused: {error}"
    except Refused as refusal:
        return f"refused: {refusal}"
    finally:
        bench.end_row()
    return "holds"


def greedy(session: Any, **decode: Any) -> list[Any]:
    """Return the chunks of a greedy decode."""
    return list(session.decode(**{"temperature": 0, "max_tokens": 8, **decode}))


def text_of(chunks: Any) -> str:
    """Return the joined text."""
    return "".join(chunk.text for chunk in chunks)


def ids_of(chunks: Any) -> list[int]:
    """Return the joined token ids."""
    return [token for chunk in chunks for token in chunk.tokens]


def raises(kind: type[Exception], call: Callable[[], Any]) -> Any:
    """Return the error of type ``kind`` that ``call`` raises; `AssertionError` without one."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def says(text: str) -> dict[str, Any]:
    """Options by which the model writes exactly ``text``."""
    return {"response_format": {"type": "choice", "choices": [text]}, "max_tokens": 200}


def near(context: Any, found: Any, wanted: Any) -> bool:
    """Whether two rows are equal within the engine's tolerance."""
    return bool(np.abs(found - wanted).max() <= 2 * context.tolerance + 1e-6)


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """Write a GGUF file as the tests write theirs."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
    try:
        from llamacpp import random_gguf
    finally:
        del sys.path[0]
    written: Path = random_gguf.write_file(path, metadata, tensors)
    return written
