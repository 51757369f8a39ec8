"""What the metrics count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from serve.asking import ASK, CHAT, LONG
from served import eventually, serving

httpx = pytest.importorskip("httpx", reason="the client that the tests use is not installed")
openai = pytest.importorskip("openai", reason="the client that the tests use is not installed")

if TYPE_CHECKING:
    from collections.abc import Callable

    from served import Served


def metrics(served: Served, headers: dict[str, str] | None = None) -> dict[str, float]:
    text = httpx.get(f"{served.url}/metrics", headers=headers).text
    rows = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in rows}


def check_what_a_client_leaves_is_counted(served: Served) -> None:
    n_prompt = served.client().chat.completions.create(**ASK).usage.prompt_tokens
    before = metrics(served)

    def grown(kind: str) -> float:
        name = f'infercore_{kind}_tokens_total{{model="tale"}}'
        return metrics(served)[name] - before[name]

    with httpx.stream("POST", served.url + CHAT, json={**LONG, "stream": True}) as answer:
        lines = answer.iter_lines()
        for _ in range(20):
            next(lines)
    eventually(lambda: grown("generated") >= 5)
    assert [grown("prompt"), grown("cached")] == [n_prompt, n_prompt - 1]


def test_metrics_count_a_request_whose_client_left(served: Served, model: Any) -> None:
    check_what_a_client_leaves_is_counted(served)
    with model.new_pool(n_ctx=512, n_threads=1) as pool, serving({"tale": pool}) as here:
        check_what_a_client_leaves_is_counted(here)


def test_metrics_count(served: Served) -> None:
    before = metrics(served)
    usage = served.client().chat.completions.create(**ASK).usage
    after = metrics(served)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grown('infercore_prompt_tokens_total{model="tale"}') == usage.prompt_tokens
    assert grown('infercore_generated_tokens_total{model="tale"}') == usage.completion_tokens
    assert grown('infercore_requests_total{status="200"}') >= 1
    assert grown('infercore_time_to_first_token_seconds_count{model="tale"}') == 1
    for gauge in ("sessions_running", "sessions_waiting", "cells_used"):
        assert f'infercore_{gauge}{{model="tale"}}' in after
    names = {name.partition("{")[0] for name in after}
    assert "infercore_cached_tokens_total" in names
    for histogram in ("time_between_tokens_seconds", "queue_seconds", "batch_size"):
        assert f"infercore_{histogram}_count" in names
    assert all(name.startswith("infercore_") for name in names)


def test_metrics_count_the_prompt_of_each_answer_and_of_vectors(served: Served) -> None:
    name = 'infercore_prompt_tokens_total{model="tale"}'

    def grown(ask: Callable[[], Any]) -> tuple[float, int]:
        before = metrics(served).get(name, 0.0)
        usage = ask().usage
        return metrics(served)[name] - before, usage.prompt_tokens

    client = served.client()
    n_counted, n_prompt = grown(lambda: client.chat.completions.create(**ASK, n=3))
    assert n_counted == 3 * n_prompt
    text = httpx.get(f"{served.url}/metrics").text
    assert "# HELP infercore_prompt_tokens_total Tokens of prompts, once for each answer" in text
    n_counted, n_prompt = grown(lambda: client.embeddings.create(model="tale", input=["a", "b c"]))
    assert n_counted == n_prompt > 0
