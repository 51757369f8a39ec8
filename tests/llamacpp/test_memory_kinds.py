"""Sessions on models that cannot take tokens back, or see only a window: exact, and truthful."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import infercore as ic
import infercore_models

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX = "Once upon a time there was a baker named Mira. " * 12
SUFFIXES = (" She baked bread.", "The end.", " She baked bread.", "Tom", " She baked cake.")
KINDS = {
    "recurrent": {},
    "sliding": {"type_k": "f32", "type_v": "f32"},
    "sliding, narrow": {"type_k": "f32", "type_v": "f32", "swa_full": False},
}


@pytest.fixture(scope="module", params=sorted(KINDS))
def opened(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return a function that opens sessions of one kind."""
    name = request.param.split(",")[0]
    with ic.load_model(infercore_models.path(name, "gguf-f32"), backend="llamacpp") as model:
        fields = {"n_ctx": 512, "n_threads": 1, "flash_attn": "off", **KINDS[request.param]}
        yield lambda **more: model.new_session(**{**fields, **more})


def greedy(session: Any, n: int = 24) -> list[int]:
    chunks = session.decode(max_tokens=n, temperature=0, ignore_eos=True)
    return [token for chunk in chunks for token in chunk.tokens]


def n_evaluated(session: Any) -> int:
    perf = session.context.perf()
    return int(perf.prefill_tokens + perf.decode_tokens)


def cold(opened: Any, text: str, n: int = 24) -> list[int]:
    with opened() as session:
        session.ensure_prefix(text)
        return greedy(session, n)


def test_warm_equals_cold_and_every_token_is_accounted_for(opened: Any) -> None:
    with opened() as session:
        n_prefix = session.ensure_prefix(PREFIX).prefix_tokens
        for suffix in SUFFIXES:
            before = n_evaluated(session)
            first = session.ensure_prefix(PREFIX)
            second = session.prefill_suffix(suffix)
            evaluated = n_evaluated(session) - before
            assert first.reused_tokens + first.prefilled_tokens == n_prefix
            told = second.prefilled_tokens + second.reevaluated_tokens
            assert first.prefilled_tokens + told == evaluated
            assert evaluated < n_prefix
            assert greedy(session) == cold(opened, PREFIX + suffix)


def test_an_edited_prefix(opened: Any) -> None:
    with opened() as session:
        session.ensure_prefix(PREFIX)
        greedy(session, 8)
        edited = PREFIX[:200] + "Suddenly it rained. " + PREFIX[200:]
        session.ensure_prefix(edited)
        assert greedy(session) == cold(opened, edited)


def test_snapshot_and_fork(opened: Any) -> None:
    with opened() as session:
        session.ensure_prefix(PREFIX)
        snapshot = session.snapshot()
        expected = greedy(session)
        with session.fork() as twin, opened() as other:
            other.restore(snapshot)
            assert greedy(other) == expected
            assert greedy(twin, 4) == greedy(session, 4)


def test_going_back_far_beyond_the_window(opened: Any) -> None:
    with opened() as session:
        session.ensure_prefix(PREFIX)
        greedy(session, 100)
        session.ensure_prefix(PREFIX[:100])
        assert greedy(session) == cold(opened, PREFIX[:100])


@pytest.mark.parametrize("name", ["storyteller", "recurrent", "sliding"])
@pytest.mark.parametrize("kv_unified", [True, False])
def test_a_snapshot_goes_between_pool_and_session(name: str, kv_unified: bool) -> None:
    path = infercore_models.path(name, "gguf-f32")
    fields = {"n_ctx": 512, "n_threads": 1, "flash_attn": "off"}
    with ic.load_model(path, backend="llamacpp") as model, model.new_session(**fields) as alone:
        alone.ensure_prefix(PREFIX)
        first = alone.snapshot()
        expected = greedy(alone), greedy(alone)
        with model.new_pool(n_parallel=3, kv_unified=kv_unified, **fields) as pool:
            others = [pool.open_session() for _ in range(3)]
            for i, session in enumerate(others):
                session.ensure_prefix(f"Story {i}.")
            others[2].restore(first)
            assert others[2].explain_context().held_tokens
            assert greedy(others[2]) == expected[0]
            alone.restore(others[2].snapshot())
            assert (greedy(alone), greedy(others[2])) == (expected[1], expected[1])
