"""The turns of conversations go to the replica that holds them, also in new sessions."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from local import LocalReplicas

from infercore_ray.engines import Engines, ReplicaPool

NAMES = ["Mira", "Tom", "Anna", "Otto", "Ida", "Emil"]


def converse(model_path: str, n_replicas: int) -> tuple[int, int, int, int]:
    """Return follow-ups, those at the holder, tokens evaluated, and how many replicas worked."""
    replicas = LocalReplicas(model_path, n_replicas, n_ctx=512, n_parallel=8, n_threads=1)
    texts = [f"Once upon a time {name} went out. " * 12 for name in NAMES]
    holders: list[Any] = [None] * len(NAMES)
    lengths = [0] * len(NAMES)
    n_follow = n_at_holder = evaluated = 0
    with ReplicaPool(Engines(replicas)) as pool, ExitStack() as opened:
        for turn in range(4):
            for number, name in enumerate(NAMES):
                session = opened.enter_context(pool.open_session())
                status = session.ensure_prefix(texts[number])
                answer = session.generate("", max_tokens=8, temperature=0.0)
                evaluated += session.explain_context().prefix_tokens - status.reused_tokens
                if turn:
                    n_follow += 1
                    n_at_holder += status.reused_tokens >= lengths[number] - 2  # some begin alike
                holders[number] = session._process.replica
                lengths[number] = session.explain_context().prefix_tokens
                texts[number] += f"{answer} And then {name} said so. "
            if turn % 2:
                replicas.report()
    replicas.close()
    return n_follow, n_at_holder, evaluated, len(set(holders))


def test_follow_ups_find_what_is_held(model_path: str) -> None:
    *_, ideal, _ = converse(model_path, 1)
    n_follow, n_at_holder, evaluated, n_used = converse(model_path, 3)
    assert n_used > 1
    assert n_at_holder >= 0.95 * n_follow
    assert evaluated <= 1.1 * ideal


@pytest.mark.parametrize("call", ["ensure_prefix", "generate", "chat"])
def test_what_a_session_begins_with_is_told_to_the_router(model_path: str, call: str) -> None:
    replicas = LocalReplicas(model_path, 2, n_ctx=512, n_parallel=4, n_threads=1)
    text = "Once upon a time Mira went out. " * 12
    with ReplicaPool(Engines(replicas)) as pool:
        with pool.open_session() as session:
            if call == "ensure_prefix":
                session.ensure_prefix(text)
            elif call == "generate":
                session.generate(text, max_tokens=1)
            else:
                list(session.chat([{"role": "user", "content": text}], max_tokens=1))
        assert any(route.blocks for _, route in replicas.routed if route.begins)
    replicas.close()
