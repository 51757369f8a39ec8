"""Fields of a context's config where a user gives none, or what other programs write out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest

import infercore as ic

if TYPE_CHECKING:
    from collections.abc import Callable

# What the core resolves alone, and what has no effect in any engine.
OF_THE_CORE = {"on_oom", "n_ctx_min", "backend_options", "defrag_thold"}


@pytest.fixture
def open_plain(model: Any) -> Any:
    """Open contexts with nothing but what a test gives; they are closed after it."""
    opened = []

    def open_one(**fields: Any) -> Any:
        opened.append(model.new_context(**{"n_ctx": 256, **fields}))
        return opened[-1]

    yield open_one
    for context in opened:
        context.close()


def refused_or(open_plain: Callable[..., Any], **fields: Any) -> tuple[Any, str]:
    """Return the context, or None and what the refusal says."""
    try:
        return open_plain(**fields), ""
    except ic.UnsupportedFeatureError as error:
        return None, str(error)


# What other programs write out, and what means there: as the model has it, where there is a GPU.
THEIR_DEFAULTS = {
    "offload_kqv": True, "op_offload": True, "rope_freq_base": 0, "rope_freq_scale": 0,
    "yarn_ext_factor": -1, "yarn_attn_factor": 1, "yarn_beta_fast": 32, "yarn_beta_slow": 1,
    "yarn_orig_ctx": 0,
}  # fmt: skip


def test_defaults_of_others_written_out_change_nothing(
    open_plain: Callable[..., Any], golden: Any
) -> None:
    tokens = list(golden.prompts[1].tokens)
    plain, written = open_plain(), open_plain(**THEIR_DEFAULTS)
    for context in (plain, written):
        context.decode(tokens)
    assert np.array_equal(plain.logits(), written.logits())
    for field, value in THEIR_DEFAULTS.items():
        open_plain(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("yarn_beta_fast", 4.0), ("yarn_beta_slow", 4.0), ("yarn_orig_ctx", 16),
        ("yarn_ext_factor", 0.5),
    ],
)  # fmt: skip
@pytest.mark.parametrize("beside", [{}, {"rope_scaling_type": "yarn"}])
def test_what_yarn_uses_is_refused_where_it_mixes_nothing(
    open_plain: Callable[..., Any], model: Any, golden: Any, field: str, value: float, beside: Any
) -> None:
    refused = (ic.UnsupportedFeatureError, f"{field}={value}.*rope_freq_scale")
    with pytest.raises(refused[0], match=refused[1]):
        open_plain(**beside, **{field: value})
    with pytest.raises(refused[0], match=refused[1]):
        model.plan_memory(n_ctx=256, **beside, **{field: value})
    mixing = {"rope_scaling_type": "yarn", "rope_freq_scale": 0.25, "yarn_orig_ctx": 64}
    rows = []
    for fields in (mixing, {**mixing, field: value}):
        context = open_plain(**fields)
        context.decode(list(golden.prompts[1].tokens))
        rows.append(context.logits().copy())
    assert context.effective[field] == value
    assert np.abs(rows[0] - rows[1]).max() > 1e-2


def test_the_defaults_are_told(open_plain: Callable[..., Any], model: Any) -> None:
    context = open_plain(n_ctx=None)
    assert context.n_ctx == min(4096, model.info.n_ctx_train)
    told = {field.name for field in attrs.fields(ic.ContextConfig)} - OF_THE_CORE
    assert told <= set(context.effective)
    assert all(context.effective[f] is not None for f in told if not f.startswith("yarn"))
    assert open_plain(n_ctx=0).n_ctx == model.info.n_ctx_train


def test_threads_that_differ_are_honoured_or_refused(open_plain: Callable[..., Any]) -> None:
    context, said = refused_or(open_plain, n_threads=1, n_threads_batch=2)
    if context is None:
        assert "n_threads_batch" in said
        return
    assert (context.n_threads, context.n_threads_batch) == (1, 2)


def test_one_number_of_whatever_kind_is_one_identity(new_session: Callable[..., Any]) -> None:
    one = new_session(n_threads=1, rope_freq_base=20000.0)
    one.ensure_prefix("Once upon a time")
    n_tokens = one.explain_context().resident_tokens
    for kind in (int, np.int64, np.float32, np.float64):
        other = new_session(n_threads=np.int64(1), rope_freq_base=kind(20000))
        other.restore(one.snapshot())
        assert other.explain_context().resident_tokens == n_tokens


def test_what_is_in_force_cannot_be_written(new_context: Callable[..., Any]) -> None:
    context = new_context()
    with pytest.raises(TypeError):
        context.effective["n_ctx"] = 1
    before = context.effective
    context.set_threads(1)
    assert before["n_threads"] == context.effective["n_threads"] == 1
