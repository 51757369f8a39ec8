"""Vectors added to what layers put out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest

import infercore as ic
import infercore_models

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def vector(model: Any) -> Any:
    return np.random.default_rng(3).normal(0, 0.5, model.info.n_embd).astype(np.float32)


def need(context: Any, vector: Any) -> None:
    """End the test where the engine has none, once the refusal has changed nothing."""
    try:
        context.set_control_vector({1: vector})
    except ic.UnsupportedFeatureError:
        context.set_control_vector(None)
        pytest.skip("refused: this engine adds nothing between its layers")
    context.set_control_vector(None)


def test_sessions_do_not_reuse_what_another_one_made(
    new_session: Callable[..., Any], vector: Any
) -> None:
    session = new_session()
    need(session.context, vector)
    before = session.ensure_prefix("Once upon a time there was a baker")
    session.context.set_control_vector({1: vector})
    after = session.ensure_prefix("Once upon a time there was a baker")
    assert after.reused_tokens == 0
    assert after.reset_reason == "control_vector changed"
    assert after.dropped_tokens == before.prefix_tokens
    assert after.manifest_digest != before.manifest_digest
    saved = session.snapshot()
    other = new_session()
    with pytest.raises(ic.ManifestMismatchError):
        other.restore(saved)
    other.context.set_control_vector({1: vector})
    other.restore(saved)
    session.context.set_control_vector(None)
    with pytest.raises(ic.InvalidStateError, match="control_vector"):
        session.snapshot()


def test_adapters_that_change_under_a_session_are_seen_too(new_session: Callable[..., Any]) -> None:
    path = str(infercore_models.path("storyteller-lora", "gguf-f32"))
    session, text = new_session(), "Once upon a time there was a baker"
    session.ensure_prefix(text)
    session.context.set_adapters([ic.AdapterSpec(path=path)])
    status = session.ensure_prefix(text)
    assert (status.reused_tokens, status.reset_reason) == (0, "adapters changed")
    with_it = new_session(adapters=[ic.AdapterSpec(path=path)])
    assert with_it.ensure_prefix(text).manifest_digest == status.manifest_digest
    assert session.ensure_prefix(text).reused_tokens == status.prefix_tokens


OTHER = ic.ContextManifest(profile_id="another")
REFUSED: dict[str, tuple[type[Exception], Callable[[Any, Any], Any]]] = {
    "long prefix": (ic.ContextOverflowError, lambda session, _: session.ensure_prefix([5] * 65)),
    "other prefix": (
        ic.ManifestMismatchError,
        lambda session, _: session.ensure_prefix(
            ic.PrefixInput(text="A", manifest=OTHER, on_mismatch="error")
        ),
    ),
    "long suffix": (ic.ContextOverflowError, lambda session, _: session.prefill_suffix([5] * 64)),
    "no token": (ic.InvalidTokenError, lambda session, _: session.prefill_suffix([-1])),
    "other suffix": (
        ic.ManifestMismatchError,
        lambda session, _: session.prefill_suffix(ic.SuffixInput(text="A", manifest=OTHER)),
    ),
    "snapshot": (ic.ManifestMismatchError, lambda session, saved: session.restore(saved)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_after_a_change_changes_nothing(
    new_session: Callable[..., Any], name: str
) -> None:
    path = str(infercore_models.path("storyteller-lora", "gguf-f32"))
    session = new_session(n_ctx=64)
    session.ensure_prefix("Once upon a time")
    session.prefill_suffix(" there was a baker")
    saved, before = session.snapshot(), session.explain_context()
    session.context.set_adapters([ic.AdapterSpec(path=path)])
    kind, call = REFUSED[name]
    with pytest.raises(kind):
        call(session, saved)
    assert session.explain_context() == before


def test_a_longer_snapshot_than_fits_changes_nothing_after_a_change(
    new_session: Callable[..., Any],
) -> None:
    path = str(infercore_models.path("storyteller-lora", "gguf-f32"))
    long, session = new_session(adapters=[ic.AdapterSpec(path=path)]), new_session(n_ctx=64)
    long.ensure_prefix([5] * 65)
    session.ensure_prefix("Once upon a time")
    session.context.set_adapters([ic.AdapterSpec(path=path)])
    before = session.explain_context()
    with pytest.raises(ic.ContextOverflowError) as caught:
        session.restore(long.snapshot())
    assert (caught.value.stage, caught.value.n_ctx) == ("restore", 64)
    assert session.explain_context() == before


def test_a_damaged_snapshot_changes_nothing_after_a_change(new_session: Callable[..., Any]) -> None:
    path = str(infercore_models.path("storyteller-lora", "gguf-f32"))
    other, session = new_session(adapters=[ic.AdapterSpec(path=path)]), new_session()
    for one in (other, session):
        one.ensure_prefix("Once upon a time")
    saved = other.snapshot()
    data = bytearray(saved.data)
    data[-40] ^= 1
    session.context.set_adapters([ic.AdapterSpec(path=path)])
    before = session.explain_context()
    with pytest.raises(ic.SnapshotError):
        session.restore(attrs.evolve(saved, data=bytes(data)))
    assert session.explain_context() == before


@pytest.mark.parametrize(
    "wrong", [5, {-1: [0.0]}, {99: [0.0]}, {1: [1.0]}, {1: "text"}, {"a": [0.0]}]
)
def test_what_fits_no_layer_is_refused(new_context: Callable[..., Any], wrong: Any) -> None:
    with pytest.raises(ic.InvalidInputError):
        new_context().set_control_vector(wrong)


@pytest.mark.parametrize("what", ["vector", "adapters", "attention"])
def test_a_fork_in_a_context_of_its_own_computes_like_its_parent(
    model: Any, vector: Any, what: str
) -> None:
    with model.new_session(n_ctx=128) as session:
        kinds = session.context.capabilities
        if what == "vector":
            need(session.context, vector)
            session.context.set_control_vector({1: vector})
        elif what == "adapters":
            if not kinds.lora:
                pytest.skip("refused: this engine takes no adapters")
            path = str(infercore_models.path("storyteller-lora", "gguf-f32"))
            session.context.set_adapters([ic.AdapterSpec(path=path, scale=2.0)])
        else:
            try:
                session.context.set_causal_attention(False)
            except ic.UnsupportedFeatureError:
                pytest.skip("refused: this engine's attention takes no mask")
        session.ensure_prefix("Once upon a time there was a baker")
        with session.fork() as twin:
            ours = "".join(c.text for c in session.decode(max_tokens=8, temperature=0))
            assert "".join(c.text for c in twin.decode(max_tokens=8, temperature=0)) == ours
            digests = [each.explain_context().manifest_digest for each in (session, twin)]
            assert digests[0] == digests[1]


def logits_of(session: Any, text: str) -> Any:
    session.ensure_prefix(text)
    session.prefill_suffix(" And")
    return session.context.logits(-1).copy()


def test_a_fork_after_a_change_starts_anew(model: Any, vector: Any) -> None:
    text = "Once upon a time there was a baker"
    with model.new_session(n_ctx=128) as session, model.new_session(n_ctx=128) as other:
        need(session.context, vector)
        session.ensure_prefix(text)
        session.context.set_control_vector({1: vector})
        other.context.set_control_vector({1: vector})
        with session.fork() as fork:
            assert fork.ensure_prefix(text).reset_reason == "control_vector changed"
            assert np.allclose(
                logits_of(fork, text), logits_of(other, text), atol=session.context.tolerance
            )


def test_forks_take_nothing_that_was_made_before_a_change(model: Any, vector: Any) -> None:
    text = "Once upon a time there was a baker"
    fields = {"n_ctx": 128, "n_seq_max": 3, "kv_unified": True}
    try:
        session = model.new_session(**fields)
    except ic.UnsupportedFeatureError:
        pytest.skip("refused: this engine has one sequence")
    with session, model.new_session(n_ctx=128) as other:
        need(session.context, vector)
        own = session.context  # of all forks
        session.ensure_prefix(text)
        with session.fork() as fork:
            own.set_control_vector({1: vector})
            other.context.set_control_vector({1: vector})
            fork.ensure_prefix("The dog ran")
            with pytest.raises(ic.ContextOverflowError):
                session.ensure_prefix(text * 30)  # it begins anew, and then does not fit
            assert np.allclose(
                logits_of(fork, text), logits_of(other, text), atol=other.context.tolerance
            )


CALLS: dict[str, Callable[[Any], Any]] = {
    "chat": lambda session: list(
        session.chat([{"role": "user", "content": "Tell me of the baker."}], max_tokens=1)
    ),
    "generate": lambda session: session.generate("Once upon a time", max_tokens=1),
    "suffix": lambda session: (
        session.state == "EMPTY" and session.ensure_prefix("Once upon a time"),
        session.prefill_suffix(" there was a baker"),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_built_on_what_was_made_before_a_change(
    new_session: Callable[..., Any], vector: Any, name: str
) -> None:
    session, other = new_session(), new_session()
    need(session.context, vector)
    CALLS[name](session)
    for each in (session, other):
        each.context.set_control_vector({1: vector})
        CALLS[name](each)
    assert session.explain_context().resident_tokens == other.explain_context().resident_tokens
    gap = np.abs(session.context.logits(-1) - other.context.logits(-1)).max()
    assert gap <= session.context.tolerance
