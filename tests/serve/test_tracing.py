"""Spans of OpenTelemetry: one for each call, with what was used and without a word of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import infercore as ic

pytest.importorskip("opentelemetry.sdk", reason="what collects the spans is not installed")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from infercore.serve import tracing

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT = [{"role": "user", "content": "Tell me of Mira."}]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter
    ic.set_observer(None)
    provider.shutdown()


def test_nobody_collects() -> None:
    assert tracing.observe() is False


def test_a_span_a_call(model: Any, spans: InMemorySpanExporter) -> None:
    assert tracing.observe()
    with model.new_pool(n_ctx=512, n_threads=1) as pool, pool.open_session() as session:
        chunks = list(session.chat(PROMPT, max_tokens=4, temperature=0))
        with pytest.raises(ic.ContextOverflowError):
            session.ensure_prefix("word " * 4000)
    usage = chunks[-1].usage
    found = {span.name: dict(span.attributes) for span in spans.get_finished_spans()}
    stream = found["infercore stream"]
    assert stream["gen_ai.usage.output_tokens"] == usage.completion_tokens
    assert stream["gen_ai.usage.input_tokens"] == usage.prompt_tokens
    assert found["infercore ensure_prefix"]["error.type"] == "ContextOverflowError"
    assert "Mira" not in str(found)
