"""What sessions of a pool share, what they never share, and what is kept of it."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infercore.conformance.expect import equal, that
from infercore.conformance.law import law
from infercore.conformance.pooling import Calls, text_of, together

if TYPE_CHECKING:
    from collections.abc import Iterator

    from infercore.conformance.rig import Rig


def _shares(rig: Rig, pool: Any) -> None:
    """Leave where nothing can be copied from one sequence to another."""
    if pool.effective["n_parallel"] == 1 or pool.capabilities.kv_copy == "none":
        rig.leave("this engine cannot copy a sequence to another")


def _goes_back(rig: Rig, pool: Any) -> None:
    """Leave where the end of a sequence cannot be dropped: only whole prefixes are shared."""
    if pool.capabilities.kv_remove not in ("any", "suffix"):
        rig.leave("this engine cannot drop the end of a sequence")


@contextmanager
def _stores(rig: Rig, **fields: Any) -> Iterator[Any]:
    """Give a pool with few cells in which sequences are moved out; leave where they cannot be."""
    pool = rig.pool(n_ctx=64, n_cells=72, n_parallel=2, **fields)
    if not pool.capabilities.sequence_state:
        rig.leave("this engine cannot save a sequence")
    _goes_back(rig, pool)
    if pool.stats().n_cells >= 2 * 64:  # each place has cells of its own: then there is one
        pool.close()
        pool = rig.pool(n_ctx=64, n_parallel=1, **fields)
    yield pool


def _more(session: Any) -> list[int]:
    chunks = session.decode(max_tokens=6, temperature=0, ignore_eos=True)
    return [token for chunk in chunks for token in chunk.tokens]


@law("POOL-15", tier="session", since="1.2")
def check_shared_prefixes(rig: Rig) -> None:
    """A prefix that another session holds is not evaluated again, and is counted correctly."""
    with Calls(rig) as calls:
        pool, text = rig.pool(), rig.passage(40)
        _shares(rig, pool)
        _goes_back(rig, pool)
        first, second = pool.open_session(), pool.open_session()
        n = first.ensure_prefix(text).prefix_tokens
        before = calls.n_tokens
        status = second.ensure_prefix(text)
        evaluated = calls.n_tokens - before
        equal(status.reused_tokens + status.prefilled_tokens, n, "reused and prefilled")
        equal(evaluated, status.prefilled_tokens, "tokens that the engine evaluated")
        that(status.reused_tokens >= n - 1, f"{status.reused_tokens} of {n} tokens were reused")
        from_others = status.shared_tokens + status.restored_tokens
        equal(from_others, status.reused_tokens, "shared and restored tokens")
        that(pool.stats().cached_tokens >= status.reused_tokens, "the pool counts less as cached")
    made = text_of(second, text, 8)
    rig.follows(rig.tokenizer.encode(text), made, "on a shared prefix")


@law("POOL-16", tier="process", needs="multi_sequence", since="1.2")
def check_sharing_in_flight(rig: Rig) -> None:
    """Sessions that ask for one prefix at once evaluate it once."""
    with Calls(rig) as calls:
        pool, text = rig.pool(n_step_tokens=16), rig.passage(120)
        _shares(rig, pool)
        _goes_back(rig, pool)
        sessions = [pool.open_session() for _ in range(4)]  # kept: what one holds goes with it
        statuses = together(pool, lambda s: s.ensure_prefix(text), sessions)
        n = statuses[0].prefix_tokens
        that(calls.n_tokens <= n + 4, f"{calls.n_tokens} tokens were evaluated for {n}")
    total = sum(status.prefilled_tokens for status in statuses)
    that(total <= n + 4, f"{total} tokens are told as prefilled")


@law("POOL-17", tier="session", needs="kv_remove", since="1.2")
def check_the_coldest_go_first(rig: Rig) -> None:
    """Cells are lost least recently used first."""
    pool = rig.pool(n_ctx=64, n_cells=160, n_parallel=4)
    if pool.stats().n_cells > 160:  # noqa: PLR2004
        rig.leave("each session has cells of its own here: none loses them to another")
    if pool.effective["n_parallel"] == 1:
        rig.leave("the pool has one sequence: only the session used last holds anything")
    texts = [rig.passage(40) for _ in range(3)]
    sessions = [pool.open_session(namespace=str(i)) for i in range(4)]
    for session, text in zip(sessions, texts, strict=False):
        session.ensure_prefix(text)
    list(sessions[0].decode(max_tokens=2, temperature=0))  # used last now
    sessions[3].ensure_prefix(rig.passage(40))
    held = [session.explain_context().held_tokens for session in sessions]
    that(held[0] >= 40 and held[3] >= 30, f"those used last lost their cells: {held}")  # noqa: PLR2004
    that(held[1] < 40, f"the least recently used kept its cells: {held}")  # noqa: PLR2004
    logical = [session.explain_context().resident_tokens for session in sessions]
    that(min(logical) > 30, f"the logical contexts changed: {logical}")  # noqa: PLR2004
    rig.follows(rig.tokenizer.encode(texts[1]), _more(sessions[1]), "with cells that were lost")


@law("POOL-18", tier="session", since="1.2")
def check_namespaces_never_share(rig: Rig) -> None:
    """What one namespace holds is never reused by another, in the engine, in memory or on disk."""
    with tempfile.TemporaryDirectory() as folder, Calls(rig) as calls:
        text = rig.passage(40)
        fields: dict[str, Any] = {"cache_bytes": 2**26, "cache_dir": str(Path(folder) / "c")}
        for other in ("b", "c"):  # the second pool finds what the first left on disk
            pool = rig.pool(**fields)
            mine, own = pool.open_session(namespace="a"), pool.open_session(namespace="a")
            n = mine.ensure_prefix(text).prefix_tokens
            own.ensure_prefix(text)
            before = calls.n_tokens
            status = pool.open_session(namespace=other).ensure_prefix(text)
            equal(status.reused_tokens, 0, "tokens reused in another namespace")
            that(calls.n_tokens - before >= n, "the engine evaluated less than all of it")
            pool.close()


@law("POOL-19", tier="session", since="1.2")
def check_moved_out_and_back(rig: Rig) -> None:
    """A sequence moved to memory comes back, is reported as restored, and continues the same."""
    with _stores(rig, cache_bytes=2**26) as pool:
        texts = [rig.passage(40), rig.passage(40)]
        first, second = pool.open_session(), pool.open_session(namespace="x")
        n = first.ensure_prefix(texts[0]).prefix_tokens
        second.ensure_prefix(texts[1])
        equal(first.explain_context().held_tokens < n, True, "the first lost its cells")
        that(pool.stats().n_moved_out > 0, "nothing is told as moved out")
        with Calls(rig) as calls:
            made = text_of(first, texts[0], 6)
            that(calls.n_tokens < n, f"{calls.n_tokens} tokens were evaluated, {n} were there")
        rig.follows(rig.tokenizer.encode(texts[0]), made, "moved out and back")


@law("POOL-20", tier="session", since="1.2")
def check_another_pool_finds_files(rig: Rig) -> None:
    """What a pool left in cache_dir is found by the next one; the text is the same."""
    with tempfile.TemporaryDirectory() as folder:
        where, text = str(Path(folder) / "c"), rig.passage(40)
        with _stores(rig, cache_dir=where) as pool:
            n = pool.open_session().ensure_prefix(text).prefix_tokens
            pool.open_session(namespace="x").ensure_prefix(rig.passage(40))
            pool.close()
        with _stores(rig, cache_dir=where) as pool:
            session = pool.open_session()
            status = session.ensure_prefix(text)
            that(status.restored_tokens >= n - 1, f"{status.restored_tokens} of {n} were restored")
            rig.follows(rig.tokenizer.encode(text), _more(session), "from a file")


@law("POOL-21", tier="session", since="1.2")
def check_damaged_files(rig: Rig) -> None:
    """A damaged cache file leads to a cold start, never to another session's text."""
    with tempfile.TemporaryDirectory() as folder:
        where, text = Path(folder) / "c", rig.passage(40)
        with _stores(rig, cache_dir=str(where)) as pool:
            pool.open_session().ensure_prefix(text)
            pool.open_session(namespace="x").ensure_prefix(rig.passage(40))
            pool.close()
        files = [path for path in where.iterdir() if path.is_file()]
        that(files, "nothing was written to cache_dir")
        for path in files:
            data = bytearray(path.read_bytes())
            for at in rig.random.sample(range(len(data)), 3):
                data[at] ^= 0x55
            path.write_bytes(data)
        with _stores(rig, cache_dir=str(where)) as pool:
            session = pool.open_session()
            status = session.ensure_prefix(text)
            equal(status.restored_tokens, 0, "tokens restored from a damaged file")
            rig.follows(rig.tokenizer.encode(text), _more(session), "beside a damaged file")


@law("POOL-22", tier="session", since="1.2")
def check_cells_balance(rig: Rig) -> None:
    """When all sessions are closed and the cache is flushed, no cell is in use."""
    pool = rig.pool()
    sessions = [pool.open_session() for _ in range(6)]
    text = rig.passage(30)
    together(pool, lambda one: text_of(one, text, 10), sessions)
    that(pool.stats().n_cells_used > 0, "no cells are told as used")
    equal(pool.stats().n_open, 6, "open sessions")
    for session in sessions:
        session.close()
    pool.flush_cache()
    stats = pool.stats()
    equal((stats.n_open, stats.n_running, stats.n_cells_used), (0, 0, 0), "what is left")
