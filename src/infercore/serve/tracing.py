"""Spans of OpenTelemetry for what sessions do, where its API is installed.

Attributes follow the semantic conventions for generative AI, version 1.37.0 ("in development").
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from infercore.session.observer import set_observer

if TYPE_CHECKING:
    from infercore.session.observer import CallEnd

_NAMES = {"stream": "chat", "generate": "text_completion", "completion": "text_completion"}
_NS_A_MS = 1e6


class Spans:
    """An observer that makes a span of each call when it ends; prompts and texts are in none."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer

    def on_call_end(self, end: CallEnd) -> None:
        """Make the span of a call."""
        now = time.time_ns()
        name = _NAMES.get(end.operation, end.operation)
        attributes = {"gen_ai.operation.name": name, "infercore.operation": end.operation}
        if end.error is not None:
            attributes["error.type"] = type(end.error).__name__
        span = self._tracer.start_span(
            f"infercore {end.operation}",
            start_time=now - round(end.elapsed_ms * _NS_A_MS),
            attributes=attributes,
        )
        if end.usage is not None:
            span.set_attribute("gen_ai.usage.input_tokens", end.usage.prompt_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", end.usage.completion_tokens)
            span.set_attribute("infercore.usage.cached_tokens", end.usage.cached_tokens)
            span.set_attribute("infercore.waited_ms", end.usage.waited_ms)
        span.end(now)


def observe() -> bool:
    """Send spans to the tracer provider of this process; False where none was set up."""
    try:
        from opentelemetry import trace  # noqa: PLC0415  (it need not be there)
    except ImportError:
        return False
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):  # nobody set one up
        return False
    set_observer(Spans(trace.get_tracer("infercore")))
    return True
