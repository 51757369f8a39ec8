"""Mistakes in this plugin that the laws see by what its rigs bring: files, options, a ranker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import pack
from infercore.conformance import find_rig, laws, run_law
from infercore_openvino import (
    additions,
    encoder,
    encoder_graph,
    graph,
    options,
    paged,
    recurrent,
)

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


def keys_of_every_layer_are_turned(m: pytest.MonkeyPatch) -> None:
    m.setattr(paged, "keys_rotate", lambda *_: True)
    m.setattr(graph.Graph, "turns_keys", True)


def a_moved_sequence_has_the_first_ones_state(m: pytest.MonkeyPatch) -> None:
    def data(self: Any, seq_id: int) -> Any:
        del seq_id
        return {v.name: v.state.data.copy() for v in self._requests[0].query_state()}

    def move(old: Any, self: Any, *args: Any) -> Any:
        m.setattr(recurrent.RecurrentContext, "_data", data)
        try:
            return old(self, *args)
        finally:
            m.setattr(recurrent.RecurrentContext, "_data", own)

    own, moved = recurrent.RecurrentContext._data, recurrent.RecurrentContext._move_to
    m.setattr(recurrent.RecurrentContext, "_move_to", lambda self, *a: move(moved, self, *a))


@pytest.mark.parametrize(
    ("rig", "law", "mistake"),
    [
        ("openvino", "EMB-12", texts_of_one_kind),
        ("openvino", "BAD-18", graphs_of_one_length),
        ("openvino", "BAD-19", one_stream_fewer),
        ("openvino-stateful", "CAP-36", rows_before_the_scale),
        ("openvino", "CAP-47", keys_of_every_layer_are_turned),
        ("openvino-recurrent", "KV-34", a_moved_sequence_has_the_first_ones_state),
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
