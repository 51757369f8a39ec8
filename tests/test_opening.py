"""A class that is called in place of the function that opens its objects names the function."""

from __future__ import annotations

import pytest

import infercore as ic


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("Session", "infercore.open_session"),
        ("Model", "infercore.load_model"),
        ("Context", "model.new_context"),
        ("Tokenizer", "model.tokenizer"),
        ("Sampler", "model.new_sampler"),
        ("Backend", "infercore.get_backend"),
        ("SessionPool", "infercore.open_pool"),
        ("AsyncSession", "await infercore.aopen_session"),
        ("AsyncContext", "await infercore.aopen_context"),
    ],
)
def test_a_direct_call_names_the_function(name: str, function: str) -> None:
    with pytest.raises(TypeError, match=function):
        getattr(ic, name)("model.gguf")


def test_protocols_can_be_subclassed() -> None:
    class Own(ic.Tokenizer):
        def __init__(self, words: list[str], *, n: int) -> None:
            self.words, self.n = words, n

    own = Own(["a"], n=1)  # type: ignore[abstract]
    assert (own.words, own.n) == (["a"], 1)
