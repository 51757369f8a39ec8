"""Whatever Python passes, each call takes it or raises a typed error, and nothing is broken."""

from __future__ import annotations

import inspect
import itertools

import numpy as np
import pytest

from infercore.errors import InferCoreError

JUNK = [
    None, True, -1, -2, 3, 10**6, 2**31 - 1, 2**31, 2**64, -(2**70), 1.5, float("nan"),
    float("inf"), "", "text", b"bytes", [], [1], [None], [[1]], (1, 2, 3), {}, {1: 2}, object(),
    np.int64(2), np.float32(1.5), np.array([1, 2]), np.array([1.5]), np.zeros((2, 2)), range(3),
    [(1, [0], True)], [(1, 0, True)], [(None,) * 3], int, [-1], ["a"], [2**70], [float("inf")],
]  # fmt: skip
CALLS = {
    "decode": ("tokens", "seq_id", "logits"),
    "decode_one": ("token", "seq_id"),
    "eval": ("tokens", "n_past", "seq_id"),
    "decode_batch": ("entries",),
    "decode_spans": ("spans",),
    "encode": ("tokens",),
    "logits": ("i",),
    "embedding": ("seq_id",),
    "n_past": ("seq_id",),
    "n_resident": ("seq_id",),
    "n_free": ("seq_id",),
    "tokens": ("seq_id",),
    "seq_pos_min": ("seq_id",),
    "seq_pos_max": ("seq_id",),
    "seq_remove": ("seq_id", "p0", "p1"),
    "seq_copy": ("src", "dst", "p0", "p1"),
    "seq_keep": ("seq_id",),
    "seq_shift": ("seq_id", "p0", "p1", "delta"),
    "seq_divide": ("seq_id", "p0", "p1", "d"),
    "save_sequence": ("seq_id",),
    "seq_state_size": ("seq_id",),
    "load_sequence": ("seq_id", "data"),
    "load_state": ("data",),
    "set_threads": ("n", "n_batch"),
    "set_embeddings": ("on",),
    "set_causal_attention": ("on",),
    "set_abort_callback": ("callback",),
    "set_adapters": ("adapters",),
    "set_control_vector": ("directions",),
}
GOOD = {
    "tokens": [1], "token": 1, "seq_id": 0, "logits": "last", "n_past": 2, "i": -1,
    "entries": [], "spans": [],
    "src": 0, "dst": 1, "p0": 0, "p1": -1, "delta": 1, "d": 2, "data": b"", "n": 1, "n_batch": 1,
    "on": False, "callback": None, "adapters": [],
    "directions": None,
}  # fmt: skip


def test_every_call_with_arguments_is_listed(several):
    from infercore.protocols.public import Context

    public = {
        name
        for name, method in inspect.getmembers(Context, inspect.isfunction)
        if not name.startswith("_") and len(inspect.signature(method).parameters) > 1
    }
    assert public == set(CALLS)


@pytest.mark.parametrize("name", sorted(CALLS))
def test_junk_is_refused_or_taken(reference_model, name):
    for field, value in itertools.product(CALLS[name], JUNK):
        arguments = {**{f: GOOD[f] for f in CALLS[name]}, field: value}
        with reference_model.new_context(n_ctx=32, n_seq_max=2, kv_unified=True) as context:
            context.decode([5, 6, 7])
            refused = None
            try:
                getattr(context, name)(**arguments)
            except InferCoreError as error:
                refused = error
            engine = context._inner
            held = [cells.tokens.tolist() for cells in engine.sequences]
            assert held == [context.tokens(s) for s in (0, 1)], arguments
            if refused is not None:
                assert refused.state_after == "unchanged", arguments
                assert held == [[5, 6, 7], []], arguments
                assert context.logits().shape == (1024,), arguments


TOKENIZER_CALLS = [
    ("encode", "text"), ("decode", "tokens"), ("token_bytes", "token"), ("is_eog", "token"),
    ("is_control", "token"), ("apply_chat_template", "messages"),
]  # fmt: skip


def refused_unchanged(call, **arguments):
    """Make the call; a refusal must be typed and leave all as it was."""
    try:
        return call(**arguments)
    except InferCoreError as error:
        if error.state_after != "unchanged":
            raise
        return None


@pytest.mark.parametrize(("name", "field"), TOKENIZER_CALLS)
def test_junk_for_the_tokenizer(toy_model, name, field):
    for value in [*JUNK, "\ud800", "a\0b", [{"role": "user"}], [{"role": 1, "content": 2}]]:
        refused_unchanged(getattr(toy_model.tokenizer, name), **{field: value})


@pytest.mark.parametrize(
    "field",
    list(inspect.signature(__import__("infercore").ContextConfig).parameters),
)
def test_junk_for_a_context(toy_model, field):
    for value in JUNK:
        if field in {"n_ctx", "n_ctx_min"} and isinstance(value, int) and value > 10**5:
            continue
        made = refused_unchanged(toy_model.new_context, **{field: value})
        if made is not None:
            made.close()
