"""Every field of a context's config is honoured and read back, or refused: none is ignored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest

import infercore as ic

if TYPE_CHECKING:
    from collections.abc import Callable

# Values that are not the default of any engine; several where the first may be refused.
VALUES: dict[str, tuple[Any, ...]] = {
    "n_ctx": (300,),
    "n_batch": (48,),
    "n_ubatch": (16,),
    "n_seq_max": (3,),
    "n_threads": (1,),
    "n_threads_batch": (1,),
    "rope_scaling_type": ("yarn", "none", "linear", "longrope"),
    "rope_freq_base": (5000.0,),
    "rope_freq_scale": (0.5,),
    "yarn_ext_factor": (0.5,),
    "yarn_attn_factor": (0.8,),
    "yarn_beta_fast": (16.0,),
    "yarn_beta_slow": (2.0,),
    "yarn_orig_ctx": (256,),
    "pooling_type": ("mean", "cls", "last", "rank"),
    "attention_type": ("non-causal",),
    "flash_attn": ("on", "off"),
    "precision": ("accurate", "fast"),
    "type_k": ("f32", "bf16", "q8_0", "q4_0", "u8"),
    "type_v": ("f32", "bf16", "q8_0", "q4_0", "u8"),
    "embeddings": (True,),
    "offload_kqv": (True, False),
    "op_offload": (True, False),
    "swa_full": (False, True),
    "kv_unified": (False, True),
    "no_perf": (True,),
}
REFUSED = ("defrag_thold",)
OUR_OWN = ("adapters", "on_oom", "n_ctx_min", "backend_options")
CASES = [(field, value) for field, values in VALUES.items() for value in values]
# What must go beside a value for it to make sense.
BESIDE = {"type_v": {"flash_attn": "auto"}, "kv_unified": {"n_seq_max": 2}}


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


def test_the_table_has_every_field() -> None:
    fields = {field.name for field in attrs.fields(ic.ContextConfig)}
    assert {*VALUES, *REFUSED, *OUR_OWN} == fields
    assert len(VALUES) + len(REFUSED) == 27


@pytest.mark.parametrize(("field", "value"), CASES)
def test_a_field_is_honoured_or_refused(
    open_plain: Callable[..., Any], field: str, value: Any
) -> None:
    context, said = refused_or(open_plain, **{**BESIDE.get(field, {}), field: value})
    if context is None:
        assert field in said
        return
    in_force = context.effective[field]
    if field == "n_ctx":
        assert in_force >= value
        assert context.n_ctx == value
    elif field in {"offload_kqv", "op_offload"} and not context.capabilities.gpu_offload:
        assert in_force is False  # nothing to put there, and told so
    else:
        assert in_force == value
    context.decode([5, 6, 7, 8])
    assert np.isfinite(context.logits()).all()


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


CHANGES_NUMBERS = ("rope_freq_base", "rope_freq_scale", "attention_type")


@pytest.mark.parametrize("field", CHANGES_NUMBERS)
def test_what_is_honoured_shows_in_the_numbers(
    open_plain: Callable[..., Any], golden: Any, field: str
) -> None:
    tokens = list(golden.prompts[1].tokens)
    plain = open_plain()
    plain.decode(tokens)
    try:
        changed = open_plain(**{field: VALUES[field][0]})
    except ic.UnsupportedFeatureError:
        return
    changed.decode(tokens)
    assert np.abs(changed.logits() - plain.logits()).max() > 1e-2


def test_the_defaults_are_told(open_plain: Callable[..., Any], model: Any) -> None:
    context = open_plain(n_ctx=None)
    assert context.n_ctx == min(4096, model.info.n_ctx_train)
    told = {*VALUES, "adapters"}
    assert told <= set(context.effective)
    assert all(context.effective[f] is not None for f in told if not f.startswith("yarn"))
    assert open_plain(n_ctx=0).n_ctx == model.info.n_ctx_train


@pytest.mark.parametrize("value", [0, 0.1, -1])
def test_a_field_without_effect_is_refused(model: Any, value: float) -> None:
    with pytest.raises(ic.InvalidInputError, match="no effect") as caught:
        model.new_context(defrag_thold=value)
    assert caught.value.field == "defrag_thold"


def test_threads_that_differ_are_honoured_or_refused(open_plain: Callable[..., Any]) -> None:
    context, said = refused_or(open_plain, n_threads=1, n_threads_batch=2)
    if context is None:
        assert "n_threads_batch" in said
        return
    assert (context.n_threads, context.n_threads_batch) == (1, 2)
