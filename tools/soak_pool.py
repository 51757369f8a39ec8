"""Keep a pool busy with a hundred threads and tasks: python tools/soak_pool.py --minutes 10.

Fifty threads and fifty tasks open sessions, chat, fork, cancel, drop streams in the middle and go
away, over few cells, so that sessions lose theirs all the time. Each text that is not disturbed is
compared with that of a single session. Prints calls, texts, errors and the memory of the process
over time; ends with an error where a call was lost, a text was wrong, cells stay taken, or memory
grew by more than a twentieth after the first fifth of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import threading
import time
from collections import Counter
from typing import Any

import psutil

import infercore as ic
import infercore_models

FORMATS = {"llamacpp": "gguf-f32", "openvino": "openvino"}
TEXTS = (
    "Once upon a time",
    "Once upon a time there was a baker",
    "The dog and the cat",
    "A little girl went to the garden",
)
N_TOKENS = 24
WAYS = ("read", "read", "dropped", "cancelled", "forked")
MIB = 2**20


class Soak:
    """What threads and tasks share: the pool, the texts that are right, and what was counted."""

    def __init__(self, pool: Any, expected: dict[tuple[str, int], list[int]], until: float) -> None:
        self.pool = pool
        self.expected = expected
        self.until = until
        self.count: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.wrong: list[str] = []

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self.until

    def note(self, **counts: int) -> None:
        with self._lock:
            self.count.update(counts)

    def compare(self, text: str, seed: int, found: list[int], *, whole: bool) -> None:
        right = self.expected[text, seed]
        if found != (right if whole else right[: len(found)]):
            self.wrong.append(f"{text!r} with seed {seed} gave {found}, alone {right}")
        self.note(texts=1)

    def thread(self, number: int) -> None:
        rng = random.Random(number)
        while self.goes_on:
            self.note(begun=1)
            try:
                self._live(rng)
            except Exception as error:  # noqa: BLE001  (counted, and told at the end)
                self.note(**{type(error).__name__: 1})
            self.note(ended=1)

    def _live(self, rng: random.Random) -> None:
        text, seed, how = rng.choice(TEXTS), rng.randrange(3), rng.choice(WAYS)
        with self.pool.open_session(namespace=rng.choice(["", "a"])) as session:
            session.ensure_prefix(text)
            found: list[int] = []
            stream = session.decode(max_tokens=N_TOKENS, seed=seed)
            for chunk in stream:
                found += chunk.tokens
                if how == "dropped":
                    break
                if how == "cancelled":
                    session.cancel()
            del stream
            self.compare(text, seed, found, whole=how in {"forked", "read"})
            if how == "forked":
                with session.fork() as twin:
                    list(twin.decode(max_tokens=3))

    async def task(self, number: int) -> None:
        rng = random.Random(1000 + number)
        while self.goes_on:
            self.note(begun=1)
            doing = asyncio.create_task(self._alive(rng))
            if rng.choice(WAYS) == "cancelled":
                await asyncio.sleep(rng.random() / 5)
                doing.cancel()
            try:
                await doing
            except asyncio.CancelledError:
                self.note(cancelled=1)
            except Exception as error:  # noqa: BLE001  (counted, and told at the end)
                self.note(**{type(error).__name__: 1})
            self.note(ended=1)

    async def _alive(self, rng: random.Random) -> None:
        text, seed = rng.choice(TEXTS), rng.randrange(3)
        async with await self.pool.aopen_session() as session:
            await session.ensure_prefix(text)
            found: list[int] = []
            async for chunk in session.decode(max_tokens=N_TOKENS, seed=seed):
                found += chunk.tokens
            self.compare(text, seed, found, whole=True)

    async def tasks(self, n: int) -> None:
        await asyncio.gather(*(self.task(i) for i in range(n)))


def alone(model: Any, fields: dict[str, Any]) -> dict[tuple[str, int], list[int]]:
    """Return what single sessions give."""
    found = {}
    for text in TEXTS:
        for seed in range(3):
            with model.new_session(n_ctx=128, **fields) as session:
                session.ensure_prefix(text)
                chunks = session.decode(max_tokens=N_TOKENS, seed=seed)
                found[text, seed] = [token for chunk in chunks for token in chunk.tokens]
    return found


def watch(soak: Soak, sizes: list[float], pause: float) -> None:
    """Print what was done, and the memory of the process, now and then."""
    process = psutil.Process()
    while soak.goes_on:
        time.sleep(pause)
        sizes.append(process.memory_info().rss / MIB)
        print(f"{sizes[-1]:.0f} MiB {dict(soak.count)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--each", type=int, default=50, help="threads, and as many tasks")
    parser.add_argument("--backend", default="llamacpp", choices=list(FORMATS))
    options = parser.parse_args()
    fields = {"n_threads": 1, "n_threads_batch": 1}
    path = infercore_models.path("storyteller", FORMATS[options.backend])
    with ic.load_model(path) as model:
        expected = alone(model, fields)
        with model.new_pool(
            n_parallel=8, n_ctx=128, n_cells=400, cache_bytes=2**22, **fields
        ) as pool:
            soak = Soak(pool, expected, time.monotonic() + 60 * options.minutes)
            sizes: list[float] = []
            pause = 60 * options.minutes / 20
            threads = [threading.Thread(target=soak.thread, args=(i,)) for i in range(options.each)]
            threads.append(threading.Thread(target=watch, args=(soak, sizes, pause)))
            for thread in threads:
                thread.start()
            asyncio.run(soak.tasks(options.each))
            for thread in threads:
                thread.join()
            stats = pool.stats()
            pool.flush_cache()
    print(dict(soak.count), stats)
    settled, last = max(sizes[3:6]), max(sizes[-3:])
    faults = [
        *soak.wrong[:5],
        *(["calls were lost"] if soak.count["begun"] != soak.count["ended"] else []),
        *(["cells stay taken"] if stats.n_cells_used or stats.n_open or stats.n_running else []),
        *([f"memory grew: {settled:.0f} to {last:.0f} MiB"] if last > 1.05 * settled else []),
    ]
    if faults:
        raise SystemExit("\n".join(faults))
    print(f"nothing lost, {len(soak.wrong)} wrong, memory {settled:.0f} to {last:.0f} MiB")


if __name__ == "__main__":
    main()
