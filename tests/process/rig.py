"""What runs inside a child process: calls in a table, each reported on a line of its own.

Run as ``python child.py BACKEND MODEL_PATH FOLDER CALL...``; `case` puts a function in the table.
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import infercore as ic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EXACT = {
    "precision": "accurate",
    "flash_attn": "off",
    "type_k": "f32",
    "type_v": "f32",
    "n_ctx": 256,
}
THREADS = {"llamacpp": {"n_threads": 1, "n_threads_batch": 1}, "openvino": {}}
BOTH = ("llamacpp", "openvino")
CASES: dict[str, tuple[Callable[[Rig], None], tuple[str, ...]]] = {}


def case(
    name: str, *, on: tuple[str, ...] = BOTH
) -> Callable[[Callable[[Rig], None]], Callable[[Rig], None]]:
    """Put a function in the table under ``name``, which is its row in the table of facts."""

    def add(work: Callable[[Rig], None]) -> Callable[[Rig], None]:
        CASES[f"{name} {work.__name__}"] = (work, on)
        return work

    return add


def names(backend: str) -> list[str]:
    """Return the cases of ``backend``, in order."""
    return [name for name, (_, backends) in CASES.items() if backend in backends]


@contextmanager
def refused(*kinds: type[BaseException], says: str = "") -> Iterator[list[Any]]:
    """Expect one of ``kinds``; the error is the list's only item afterwards."""
    caught: list[Any] = []
    try:
        yield caught
    except kinds as error:
        caught.append(error)
        assert says in str(error), str(error)  # noqa: PT017  (several kinds may be right)
    else:
        raise AssertionError(f"nothing was raised, not {[kind.__name__ for kind in kinds]}")


class Rig:
    """A loaded model, and contexts on it that are closed after the case."""

    def __init__(self, backend: str, path: str, folder: str) -> None:
        self.backend, self.path, self.folder = backend, path, Path(folder)
        self.model = ic.load_model(path, backend=backend)
        self._models: dict[str, Any] = {}
        self._opened: list[Any] = []

    def open(self, model: Any = None, **fields: Any) -> Any:
        """Open a context with float32 throughout, closed after the case."""
        fields = {**EXACT, **THREADS[self.backend], **fields}
        self._opened.append((model or self.model).new_context(**fields))
        return self._opened[-1]

    def plain(self, kind: str, **fields: Any) -> Any:
        """Open a context on a random model of ``kind`` (llama.cpp only)."""
        if kind not in self._models:
            from llamacpp import random_gguf

            path = random_gguf.write(self.folder / f"{kind}.gguf", kind)
            self._models[kind] = ic.load_model(path, backend="llamacpp")
        given = {"n_ctx": 128, **THREADS["llamacpp"], **fields}
        self._opened.append(self._models[kind].new_context(**given))
        return self._opened[-1]

    def finish(self) -> None:
        """Close what the case opened."""
        while self._opened:
            self._opened.pop().close()

    @contextmanager
    def unchanged(self, context: Any) -> Iterator[None]:
        """Check that ``context`` holds afterwards what it held, and goes on as it would have."""
        before = [snapshot(context, s) for s in range(context.n_seq_max)]
        rows = context.n_outputs
        row = context.logits().copy() if rows else None
        yield
        assert [snapshot(context, s) for s in range(context.n_seq_max)] == before
        assert context.n_outputs == rows
        if row is not None:
            assert np.array_equal(context.logits(), row)


def snapshot(context: Any, seq_id: int) -> tuple[Any, ...]:
    """Return what is known of a sequence from outside."""
    held = (context.tokens(seq_id), context.n_past(seq_id), context.n_resident(seq_id))
    return (*held, context.seq_pos_min(seq_id), context.seq_pos_max(seq_id))


def near(left: Any, right: Any, limit: float = 1e-4) -> None:
    """Check that two rows of logits are the same within ``limit``."""
    worst = float(np.abs(np.asarray(left) - np.asarray(right)).max())
    assert worst < limit, worst


def ids(n: int, start: int = 5) -> list[int]:
    """Return ``n`` token ids that differ from their neighbours."""
    return [start + (7 * i) % 90 for i in range(n)]


def fresh(rig: Rig, tokens: list[int], **fields: Any) -> Any:
    """Return the last logits of ``tokens`` in a context of their own."""
    context = rig.open(**fields)
    context.decode(tokens)
    row = context.logits().copy()
    context.close()
    return row


def main(arguments: list[str]) -> None:
    """Run the cases named, a line of JSON before and after each."""
    import traceback

    backend, path, folder, *wanted = arguments
    rig = Rig(backend, path, folder)
    for name in wanted:
        tell(begins=name)
        try:
            CASES[name][0](rig)
            rig.finish()
        except BaseException:  # noqa: BLE001  (told to the parent)
            tell(fails=traceback.format_exc())
        else:
            tell(ends=name)


def tell(**what: str) -> None:
    """Send a line to the parent."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()
