"""Sessions over an engine that generates by itself: all laws of sessions that need no logits."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

import infercore
import infercore_models
from infercore.conformance import check_backend
from infercore_openvino_genai.conformance import open_path, rig

if TYPE_CHECKING:
    from collections.abc import Iterator

LEAST = 55
"""Laws of sessions that are kept, and not refused: fewer would mean that something was lost."""


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    """Return the storyteller."""
    with open_path(str(infercore_models.path("storyteller", "openvino"))) as model:
        yield model


def test_every_law_of_sessions_is_kept_that_needs_no_logits() -> None:
    report = check_backend(rig(), only="session")
    assert [(r.id, r.reason) for r in report.results if r.outcome == "FAIL"] == []
    assert Counter(r.outcome for r in report.results)["ok"] >= LEAST


def test_it_tells_the_golden_story(model: Any) -> None:
    for prompt in infercore_models.golden("storyteller").prompts[:3]:
        with model.new_session(n_ctx=512, precision="accurate", type_k="f32") as session:
            session.ensure_prefix(list(prompt.tokens))
            chunks = session.decode(max_tokens=16, temperature=0)
            tokens = [token for chunk in chunks for token in chunk.tokens]
        assert tokens == list(prompt.greedy)[: len(tokens)]
        assert tokens


def test_a_seed_gives_its_text_again(model: Any) -> None:
    texts = {}
    with model.new_session(n_ctx=256) as session:
        for seed in (1, 3, 1, 3):
            session.ensure_prefix("Once upon a time")
            text = "".join(
                c.text for c in session.decode(max_tokens=30, temperature=1.5, seed=seed)
            )
            assert texts.setdefault(seed, text) == text
    assert texts[1] != texts[3]


def test_sessions_stand_beside_each_other(model: Any) -> None:
    with model.new_session(n_ctx=256) as one, model.new_session(n_ctx=256) as other:
        one.ensure_prefix("Once upon a time")
        other.ensure_prefix("The old stone bridge")
        alone = one.generate("", max_tokens=12, temperature=0)
        one.ensure_prefix("Once upon a time")
        streams = [s.decode(max_tokens=12, temperature=0) for s in (one, other)]
        first = next(streams[0]).text
        assert list(streams[1])
        assert first + "".join(chunk.text for chunk in streams[0]) == alone


def test_settings_that_the_engine_lacks_are_refused(model: Any) -> None:
    with model.new_session(n_ctx=64) as session:
        session.ensure_prefix("Once")
        for fields in ({"repeat_penalty": 1.5}, {"mirostat": 2}, {"logit_bias": {5: 1.0}}):
            with pytest.raises(infercore.UnsupportedFeatureError, match=next(iter(fields))):
                session.decode(**fields)
