"""Files of API keys."""

from __future__ import annotations

import pytest

import infercore as ic
from infercore.values.keys import keys_in


def test_one_key_a_line_without_comments() -> None:
    assert keys_in("# ours\nfirst\n\n  second \r\n", "keys") == ("first", "second")
    with pytest.raises(ic.InvalidInputError, match="keys contains no keys"):
        keys_in("# none yet\n\n", "keys")


def test_the_mark_that_some_editors_begin_a_file_with_is_of_no_key() -> None:
    assert keys_in("\ufefffirst\nsecond", "keys") == ("first", "second")
    assert keys_in("\ufeff# ours\nfirst", "keys") == ("first",)
