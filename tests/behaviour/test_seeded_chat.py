"""A chat with seeds has one text, whatever else its pool has to do meanwhile."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

TURNS = ("Tell me of Mira.", "And then?", "Who lived in the mill?")
N_RUNS, N_TOKENS, SECONDS = 20, 24, 60


@pytest.fixture
def pool(model: Any, exact: dict[str, Any]) -> Iterator[Any]:
    """Four places, and cells for little more than one chat, so that texts lose theirs."""
    with model.new_pool(**exact, n_ctx=320, n_parallel=4, n_cells=360, n_step_tokens=32) as pool:
        yield pool


def chat(session: Any) -> list[str]:
    """Return the answers to `TURNS`."""
    messages: list[dict[str, str]] = []
    for seed, turn in enumerate(TURNS):
        messages.append({"role": "user", "content": turn})
        chunks = session.chat(messages, max_tokens=N_TOKENS, temperature=1.0, seed=seed)
        messages.append({"role": "assistant", "content": "".join(c.text for c in chunks)})
    return [m["content"] for m in messages if m["role"] == "assistant"]


class Load:
    """Sessions that come, generate, are cut short and go, up to ``n`` at once."""

    def __init__(self, pool: Any, n: int, seed: int) -> None:
        self._pool, self._over = pool, threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=(random.Random(f"{seed} {i}"),))
            for i in range(n)
        ]
        self.n_texts = 0

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(SECONDS)
            assert not thread.is_alive()

    def _work(self, rng: random.Random) -> None:
        while not self._over.is_set():
            with self._pool.open_session() as session:
                session.ensure_prefix("Once upon a time " * rng.randint(1, 40))
                for _ in range(rng.randint(1, 3)):
                    stream = session.decode(max_tokens=rng.randint(1, 60), ignore_eos=True)
                    for _ in range(rng.randint(1, 30)):
                        if next(stream, None) is None or self._over.is_set():
                            break
                    stream.close()
                    self.n_texts += 1


def test_its_text_is_that_of_a_session_alone(model: Any, pool: Any, exact: dict[str, Any]) -> None:
    with model.new_session(**exact, n_ctx=320) as alone:
        expected = chat(alone)
    assert len(set(expected)) == len(TURNS)
    n_texts = 0
    for run in range(N_RUNS):
        with Load(pool, run % 6, run) as load, pool.open_session() as session:
            assert chat(session) == expected
        n_texts += load.n_texts
    assert n_texts > N_RUNS
    stats = pool.stats()
    assert stats.n_moved_out + stats.n_preempted
