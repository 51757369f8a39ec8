"""What a backend may declare."""

from __future__ import annotations

import pytest

import infercore as ic


def test_nothing_but_text_may_be_declared_yet() -> None:
    assert ic.Capabilities().media == ()
    with pytest.raises(ic.InvalidInputError, match="media"):
        ic.Capabilities(media=("image",))
