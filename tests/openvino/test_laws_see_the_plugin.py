"""Mistakes in this plugin that the laws see by what its rigs bring: files, options, a ranker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import pack
from infercore.conformance import find_rig, laws, run_law
from infercore_openvino import additions, encoder, encoder_graph, options

if TYPE_CHECKING:
    from collections.abc import Callable


def texts_of_one_kind(m: pytest.MonkeyPatch) -> None:
    old = encoder.EncoderContext._infer

    def infer(self: Any, request: Any, texts: Any) -> Any:
        self._has_types = False
        return old(self, request, texts)

    m.setattr(encoder.EncoderContext, "_infer", infer)


def graphs_of_one_length(m: pytest.MonkeyPatch) -> None:
    m.setattr(encoder_graph, "_check", lambda *_: None)


def one_stream_fewer(m: pytest.MonkeyPatch) -> None:
    m.setitem(options.CONTEXT_OPTIONS, "num_streams", (lambda n: 1 <= n < 64, "1 to 64"))


def rows_before_the_scale(m: pytest.MonkeyPatch) -> None:
    m.setattr(additions, "_scaled", lambda node: node)


@pytest.mark.parametrize(
    ("rig", "law", "mistake"),
    [
        ("openvino", "EMB-12", texts_of_one_kind),
        ("openvino", "BAD-18", graphs_of_one_length),
        ("openvino", "BAD-19", one_stream_fewer),
        ("openvino-stateful", "CAP-36", rows_before_the_scale),
    ],
)
def test_a_mistake_is_seen(
    rig: str,
    law: str,
    mistake: Callable[[Any], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pack.need_pack()
    mistake(monkeypatch)
    subject = find_rig(rig)
    try:
        found = run_law(next(each for each in laws() if each.id == law), subject)
    finally:
        subject.close()
    assert found.outcome == "FAIL", found
