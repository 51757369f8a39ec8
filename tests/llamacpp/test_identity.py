"""Whatever changes what a cache holds belongs to the identity of saved state."""

from __future__ import annotations

import pytest

import infercore as ic

CHANGED = {
    "rope base": {"kv_overrides": {"llama.rope.freq_base": 200.0}},
    "epsilon": {"kv_overrides": {"llama.attention.layer_norm_rms_epsilon": 1e-3}},
    "layout": {"use_extra_bufts": False},
}


@pytest.fixture
def opened(story_path):
    models = []

    def opened(**options):
        models.append(ic.load_model(story_path, backend_options=options, check_in_child=False))
        session = models[-1].new_session(n_ctx=256)
        session.ensure_prefix("Once upon a time")
        return models[-1], session

    yield opened
    for model in models:
        model.close()


@pytest.mark.parametrize("options", CHANGED.values(), ids=CHANGED)
def test_state_of_a_model_with_other_options_is_refused(opened, options):
    model, session = opened()
    snapshot = session.snapshot()
    context = model.new_context(n_ctx=256)
    context.decode([5, 6, 7])
    saved = context.save_state(), context.save_sequence(0)
    other_model, other = opened(**options)
    with pytest.raises(ic.ManifestMismatchError) as caught:
        other.restore(snapshot)
    assert caught.value.field == "runtime_digest"
    target = other_model.new_context(n_ctx=256)
    with pytest.raises(ic.SnapshotError):
        target.load_state(saved[0])
    with pytest.raises(ic.SnapshotError):
        target.load_sequence(0, saved[1])
    again, _ = opened(**options)
    other_context = other_model.new_context(n_ctx=256)
    other_context.decode([5, 6, 7])
    again.new_context(n_ctx=256).load_state(other_context.save_state())


def test_what_changes_nothing_is_no_identity(opened):
    _, session = opened()
    _, other = opened(no_host=True)
    other.restore(session.snapshot())


def test_the_order_of_overrides_is_no_identity(opened):
    pairs = {"llama.rope.freq_base": 200.0, "llama.attention.layer_norm_rms_epsilon": 1e-3}
    _, session = opened(kv_overrides=pairs)
    _, other = opened(kv_overrides=dict(reversed(pairs.items())))
    other.restore(session.snapshot())


def test_what_is_overridden_is_told(opened):
    model, session = opened(kv_overrides={"llama.rope.freq_base": 200.0})
    assert session.context.effective["rope_freq_base"] == 200.0
    assert model.info.metadata["llama.rope.freq_base"] == "200.0"


def test_a_switch_of_the_environment_is_identity(opened, monkeypatch):
    _, session = opened()
    snapshot = session.snapshot()
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
    _, other = opened()
    with pytest.raises(ic.ManifestMismatchError):
        other.restore(snapshot)
