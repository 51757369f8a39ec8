"""A text cut anywhere is held as it is tokenized whole."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pieces = st.sampled_from(
    ["the ", "Once upon ", "é", "\U0001f600", "漢字", "<s>", "<|end|>", "<|im_start|>",
     "<|im_end|>",
     "\n\n", "  ", "a", "ing", "<|", "im_", "\x00", "'s"]
)  # fmt: skip
texts = st.lists(st.one_of(pieces, st.text(max_size=3)), max_size=10).map("".join)
texts = texts.filter(lambda text: not any(0xD800 <= ord(c) <= 0xDFFF for c in text))


def check(model: Any, session: Any, text: str, cut: int) -> None:
    whole = session.encode(text, parse_special=True)
    if len(whole) >= 120:
        return
    session.ensure_prefix(text[:cut])
    status = session.prefill_suffix(text[cut:])
    held = session.context.tokens()[: status.resident_tokens]
    assert held == whole
    assert status.prefix_tokens + status.suffix_tokens == len(whole)
    assert status.reused_tokens + status.prefilled_tokens == status.suffix_tokens
    n_prefix = len(session.encode(text[:cut], parse_special=True))
    assert status.seam_tokens == n_prefix - status.prefix_tokens


def steps(session: Any, n: int) -> list[tuple[int, float]]:
    """Greedy tokens, each with how far the best was ahead of the second."""
    chunks = session.decode(max_tokens=n, temperature=0, ignore_eos=True, logprobs=2)
    found = [step for chunk in chunks for step in chunk.logprobs]
    return [(step.token, step.top[0][1] - step.top[1][1]) for step in found]


def check_goes_on_as_cold(model: Any, session: Any, fields: dict[str, Any], n: int = 64) -> None:
    """The next tokens are a cold session's, up to a tie within the tolerance."""
    held = session.context.tokens()[: session.explain_context().resident_tokens]
    if not held:
        return
    with model.new_session(**fields) as cold:
        cold.ensure_prefix("x")
        cold.resident.hold(held, need_logits=True)
        cold.enter("READY", cold.parts)
        expected = steps(cold, n)
    for (token, _), (wanted, lead) in zip(steps(session, n), expected, strict=True):
        if token != wanted:
            assert lead < 2 * session.context.tolerance
            return


LAX = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@pytest.mark.parametrize("add_bos", [True, False])
def test_toy(toy: Any, add_bos: bool) -> None:
    session = toy.new_session(n_ctx=128, add_bos=add_bos)

    @settings(max_examples=200, deadline=None, suppress_health_check=LAX)
    @given(texts, st.integers(0, 40))
    def law(text: str, cut: int) -> None:
        check(toy, session, text, min(cut, len(text)))

    law()


@pytest.mark.parametrize("add_bos", [True, False])
def test_reference(reference: Any, add_bos: bool, greedy: Any) -> None:
    session = reference.new_session(n_ctx=128, add_bos=add_bos)

    @settings(max_examples=30, deadline=None, suppress_health_check=LAX)
    @given(texts, st.integers(0, 40))
    def law(text: str, cut: int) -> None:
        check(reference, session, text, min(cut, len(text)))

    law()
    assert session.encode("a", parse_special=True)[0] == reference.tokenizer.bos or not add_bos


@pytest.mark.parametrize("add_bos", [True, False])
def test_engines(model: Any, exact: dict[str, str], add_bos: bool) -> None:
    fields = {"n_ctx": 200, "n_threads": 1, "add_bos": add_bos, **exact}
    with model.new_session(**fields) as session:

        @settings(max_examples=25, deadline=None, suppress_health_check=LAX)
        @given(texts, st.integers(0, 40))
        def law(text: str, cut: int) -> None:
            check(model, session, text, min(cut, len(text)))
            check_goes_on_as_cold(model, session, fields)

        law()
