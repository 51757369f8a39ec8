"""In a pool those that run keep neighbouring places where each has a cache of its own."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import infercore as ic
from infercore.session import pool_stream
from infercore.session.jobs import Generating

sys.path.append(str(Path(__file__).parent.parent / "session"))

import pool_cases
from pool_waits import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

PLACES = 6
N_TOKENS = 300
TEXTS = tuple(f"{i} Once upon a time there was a baker" for i in range(PLACES))


@pytest.fixture
def pool(story_path: Path) -> Iterator[ic.SessionPool]:
    fields: dict[str, Any] = {"kv_unified": False, "batching": "always", "n_threads": 1}
    with ic.open_pool(story_path, n_ctx=512, n_parallel=PLACES, **fields) as pool:
        yield pool


class Ids:
    """Notes which of the engine's sequences each step evaluates."""

    def __init__(self, pool: Any) -> None:
        self.steps: list[list[int]] = []
        pool.owner.scheduler.stepping.on_call = self._note

    def _note(self, sequences: list[Any]) -> None:
        if sequences:
            self.steps.append([sequence.seq_id for sequence in sequences])


def read(stream: Any) -> list[int]:
    return [token for chunk in stream for token in chunk.tokens]


def n_pieces(ids: list[int]) -> int:
    return 1 + sum(b > a + 1 for a, b in pairwise(ids))


class Unread(Generating):
    """Rests for no reader that falls behind, as one does on a busy machine."""

    __slots__ = ()

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **{**fields, "n_ahead": sys.maxsize})


def test_a_gap_is_closed_and_texts_go_on(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_stream, "Generating", Unread)
    fields: dict[str, Any] = {"max_tokens": N_TOKENS, "temperature": 0, "ignore_eos": True}
    with ExitStack() as stack:
        alone = stack.enter_context(pool.open_session(namespace="alone"))
        expected = []
        for text in TEXTS:
            alone.ensure_prefix(text)
            expected.append(read(alone.decode(**fields)))
        alone.close()
        free = pool.owner.scheduler.places.free_ids
        wait_for(lambda: len(free) == PLACES)  # else who comes next gets another place
        sessions = [stack.enter_context(pool.open_session()) for _ in TEXTS]
        ids = Ids(pool)
        for session, text in zip(sessions, TEXTS, strict=True):
            session.ensure_prefix(text)
        sessions[1].close()
        sessions[3].close()
        left = [0, 2, 4, 5]
        at = sorted(sessions[i].context.sequence.seq_id for i in left)
        assert at[-1] - at[0] >= len(left)  # there is a gap
        ids.steps.clear()
        with ThreadPoolExecutor(len(left)) as threads:
            calls = [threads.submit(lambda i=i: read(sessions[i].decode(**fields))) for i in left]
            found = [call.result() for call in calls]
        whole = [step for step in ids.steps if len(step) == len(left)]
        # Those that begin first may close a gap of their own, which leaves two: 0, 1, 4, 5.
        assert n_pieces(whole[-1]) == 1
        assert found == [expected[i] for i in left]
        for session, i in zip((sessions[i] for i in left), left, strict=True):
            assert session.resident.wanted()[-N_TOKENS:] == expected[i]
            assert isinstance(session.explain_context(), ic.ContextReport)
    assert pool.stats().n_cells_used == 0
    assert sorted(pool.owner.scheduler.places.free_ids) == list(range(PLACES))


@pytest.mark.parametrize("seed", [4, 11])
def test_lives_with_cells_of_their_own_are_lives_alone(story_path: Path, seed: int) -> None:
    with ic.load_model(story_path) as model:
        pool_cases.check(model, seed, apart=True, n_threads=1, n_threads_batch=1)
