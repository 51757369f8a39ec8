"""Rows of the fields of a context: each value is read back and computes, or is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import infercore as ic
from rows.bench import Refused, raises
from rows.sections import FIELDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from rows.bench import Bench

SAME, OTHER, FINITE = "same", "other", "finite"

# The value, and whether the logits are then the model's own, others, or just numbers.
VALUES: tuple[tuple[str, Any, str], ...] = (
    ("n_ctx", 300, SAME),
    ("n_batch", 8, SAME),
    ("n_ubatch", 4, SAME),
    ("n_seq_max", 3, SAME),
    ("n_threads", 1, SAME),
    ("n_threads_batch", 1, SAME),
    ("rope_scaling_type", "none", SAME),
    ("rope_scaling_type", "linear", FINITE),
    ("rope_scaling_type", "yarn", FINITE),
    ("rope_scaling_type", "longrope", FINITE),
    ("rope_freq_base", 20000.0, OTHER),
    ("rope_freq_base", 0, SAME),
    ("rope_freq_scale", 0.5, OTHER),
    ("rope_freq_scale", 0, SAME),
    ("yarn_ext_factor", -1, SAME),
    ("yarn_ext_factor", 1.0, OTHER),
    ("yarn_attn_factor", 0.8, FINITE),
    ("yarn_beta_fast", 16.0, OTHER),
    ("yarn_beta_slow", 2.0, OTHER),
    ("yarn_orig_ctx", 0, SAME),
    ("yarn_orig_ctx", 512, OTHER),
    ("pooling_type", "mean", FINITE),
    ("pooling_type", "cls", FINITE),
    ("pooling_type", "last", FINITE),
    ("pooling_type", "rank", FINITE),
    ("attention_type", "non-causal", OTHER),
    ("flash_attn", "auto", FINITE),
    ("flash_attn", "on", FINITE),
    ("flash_attn", "off", SAME),
    ("embeddings", True, FINITE),
    ("offload_kqv", True, SAME),
    ("offload_kqv", False, SAME),
    ("op_offload", True, SAME),
    ("op_offload", False, SAME),
    ("swa_full", True, SAME),
    ("swa_full", False, SAME),
    ("kv_unified", True, SAME),
    ("kv_unified", False, SAME),
    ("no_perf", True, SAME),
    *(
        (f"type_{which}", kind, SAME if kind == "f32" else FINITE)
        for which in "kv"
        for kind in ("f32", "f16", "bf16", "q8_0", "q4_0", "u8")
    ),
)
BESIDE: dict[str, dict[str, Any]] = {
    "kv_unified": {"n_seq_max": 2},
    "type_k": {"flash_attn": "auto", "precision": None, "type_v": None},
    "type_v": {"flash_attn": "auto", "precision": None, "type_k": None},
    "flash_attn": {"precision": None},
}
YARN = {"rope_scaling_type": "yarn", "rope_freq_scale": 0.25}  # what its other fields go with
WRITTEN_OUT = ("rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_orig_ctx")
PROPERTIES = ("n_batch", "n_ubatch", "n_seq_max", "n_threads", "n_threads_batch", "pooling_type")
OFFLOADED = ("offload_kqv", "op_offload")


def _honoured(name: str, value: Any, numbers: str) -> Callable[[Bench], None]:
    def check(b: Bench) -> None:
        yarn = YARN if name.startswith("yarn") and numbers is OTHER else {}
        context = b.context(**{**BESIDE.get(name, {}), **yarn, name: value})
        in_force = context.n_ctx if name == "n_ctx" else context.effective[name]
        if name in OFFLOADED and not context.capabilities.gpu_offload:
            assert in_force is False
        elif value == "auto":
            assert in_force in ("auto", "on", "off")
        elif not (name in WRITTEN_OUT and numbers is SAME):  # "as the model has it"
            assert in_force == value
        if name in PROPERTIES:
            assert getattr(context, name) == in_force
        context.decode(b.tokens)
        if name == "pooling_type":
            found = context.embedding()
            assert found.shape == (b.model.info.n_embd,)
            assert np.isfinite(found).all()
            return
        row, plain = context.logits(), b.last_row()
        assert np.isfinite(row).all()
        distance = np.abs(row - plain).max()
        if numbers is SAME:
            assert distance <= context.tolerance
        if numbers is OTHER:
            assert distance > 1e-2

    return check


for _name, _value, _numbers in VALUES:
    FIELDS.row(f"`{_name}={_value!r}`", f"`ContextConfig.{_name}`")(
        _honoured(_name, _value, _numbers)
    )


@FIELDS.row("`defrag_thold=0.1`", "`ContextConfig.defrag_thold`")
def _(b: Bench) -> None:
    wrong: dict[str, Any] = {"defrag_thold": 0.1}
    error = raises(ic.InvalidInputError, lambda: b.context(**wrong))
    assert error.field == "defrag_thold"
    raise Refused(str(error))


@FIELDS.row("`n_threads` and `n_threads_batch` that differ", "`ContextConfig.n_threads_batch`")
def _(b: Bench) -> None:
    context = b.context(n_threads=1, n_threads_batch=2)
    assert (context.n_threads, context.n_threads_batch) == (1, 2)


@FIELDS.row("`llama_context_default_params`", "`Context.effective`")
def _(b: Bench) -> None:
    with b.model.new_context() as context:
        assert context.n_ctx == min(4096, b.model.info.n_ctx_train)
        names = {name for name, _, _ in VALUES if not name.startswith("yarn")}
        assert all(context.effective[name] is not None for name in names)


@FIELDS.row("`n_ctx=0`: the trained window", "`ContextConfig.n_ctx`")
def _(b: Bench) -> None:
    assert b.context(n_ctx=0).n_ctx == b.model.info.n_ctx_train


@FIELDS.row("every accepted `KvCacheType` works", "`Capabilities.kv_types`")
def _(b: Bench) -> None:
    kinds = b.model.capabilities.kv_types
    assert "f16" in kinds
    for kind in kinds:
        beside = {**BESIDE["type_k"], "type_k": kind, "type_v": kind}
        if kind == "bf16" and b.backend == "openvino":
            beside["backend_options"] = {"inference_precision": "bf16"}
        assert b.held(**beside).effective["type_k"] == kind
