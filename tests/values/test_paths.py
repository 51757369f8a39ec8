"""One converter for paths: what the system cannot take is refused before it is asked."""

from __future__ import annotations

import sys

import pytest

import infercore as ic
from infercore.values import checks


@pytest.mark.parametrize(
    "value", [None, 5, 1.5, [], {}, object(), "a\0b", b"a\0b", b"x", "\ud800", "", True]
)
def test_what_is_no_path(value):
    with pytest.raises(ic.InvalidInputError) as caught:
        checks.check_path("path", value)
    assert caught.value.field == "path"


def test_an_encoding_that_lacks_a_character(monkeypatch):
    def ascii_only(path):
        return path.encode("ascii")

    monkeypatch.setattr("os.fsencode", ascii_only)
    with pytest.raises(ic.InvalidInputError, match="PYTHONUTF8"):
        checks.check_path("path", "\u0444.snap")


@pytest.mark.skipif(sys.platform == "win32", reason="names are bytes elsewhere")
def test_names_that_are_no_text_stay_allowed(tmp_path):
    assert checks.check_path("path", tmp_path) == str(tmp_path)
    assert checks.check_path("path", "a\udcff") == "a\udcff"


@pytest.mark.parametrize("value", [5, None, b"x", "\ud800", "a\0b", ""])
def test_sessions_use_it(value):
    from infercore.testing import load_toy_model

    with load_toy_model() as model, model.new_session(n_ctx=64) as session:
        session.ensure_prefix("a")
        for call in (session.save, session.load):
            with pytest.raises(ic.InvalidInputError):
                call(value)
        assert session.state == "PREFIXED"


@pytest.mark.parametrize("tokens", [5, "x", [None], ["1"], [1.5], [object()], NotImplemented])
def test_hashes_of_what_is_no_tokens(tokens):
    with pytest.raises(ic.InvalidInputError):
        ic.hash_token_ids(tokens)


@pytest.mark.parametrize("value", [5, b"x", "\ud800", "a\0b", ""])
@pytest.mark.parametrize(
    "of", [lambda path: ic.AdapterSpec(path=path), lambda path: ic.PoolConfig(cache_dir=path)]
)
def test_configs_use_it(of, value):
    with pytest.raises(ic.InvalidInputError):
        of(value)
