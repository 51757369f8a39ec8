"""An engine that the environment requires is there; otherwise the run must not be green."""

from __future__ import annotations

import pytest

import pack


def test_required_backends_can_be_used() -> None:
    reasons = {name: pack.missing(name) for name in pack.required()}
    assert {name: reason for name, reason in reasons.items() if reason} == {}


def test_a_required_engine_fails_where_another_is_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(pack.REQUIRE, "")
    with pytest.raises(pytest.skip.Exception, match="no backend is named 'warpdrive'"):
        pack.need_backend("warpdrive")
    monkeypatch.setenv(pack.REQUIRE, "openvino, warpdrive")
    with pytest.raises(pytest.fail.Exception, match="required by INFERCORE_REQUIRE_BACKENDS"):
        pack.need_backend("warpdrive")
