"""Sequences at the edges of blocks and steps, tokens of two sequences, options told as asked."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.conformance.expect import equal, raises, that
from infercore.conformance.law import law
from infercore.conformance.laws.cancel import AfterCalls
from infercore.conformance.options import OPTIONS, refusal
from infercore.conformance.oracle import Way
from infercore.errors import (
    DecodeAbortedError,
    InvalidInputError,
    ModelNotFoundError,
    OutOfMemoryError,
    UnsupportedFeatureError,
)
from infercore.values.config import AdapterSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from infercore.conformance.rig import Rig

REFUSED = (UnsupportedFeatureError, InvalidInputError)
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 128, 129)
"""Around the sizes that blocks of a cache have."""


# -- state and copies ------------------------------------------------------------------------------


@law("STATE-29", needs="sequence_state", since="1.2")
def check_state_of_every_length(rig: Rig) -> None:
    """A sequence saved at any length, just before, at and after a whole block, continues as it."""
    tokens, source, target = rig.tokens(140), rig.context(), rig.context()
    for n in LENGTHS:
        if n + 2 > rig.n_ctx:
            break
        source.clear()
        source.decode(tokens[:n])
        target.load_sequence(0, source.save_sequence(0))
        for token in tokens[n : n + 2]:
            for context in (source, target):
                context.decode_one(token)
        rig.near(target.logits(), np.array(source.logits()), f"a sequence of {n} tokens, restored")


@law("STATE-30", needs="state", since="1.2")
def check_state_of_many_sequences(rig: Rig) -> None:
    """Saved state holds every sequence, however many there are, each as long as it was."""
    n_seq = 6
    if not rig.context().capabilities.multi_sequence:
        rig.leave("there is one sequence only")
    lengths = [3, 0, 33, 7, 1, 18]
    texts = [rig.tokens(max(1, n)) for n in lengths]
    fields = {"n_seq_max": n_seq, "n_ctx": n_seq * 64}
    source, target = rig.context(**fields), rig.context(**fields)
    for seq_id, n in enumerate(lengths):
        if n:
            source.decode(texts[seq_id][:n], seq_id=seq_id)
    target.decode(rig.tokens(5), seq_id=1)
    target.load_state(source.save_state())
    found = [target.n_past(seq_id) for seq_id in range(n_seq)]
    equal(found, lengths, "n_past of the sequences")
    more = rig.tokens(2)
    for seq_id, n in enumerate(lengths):
        rows = []
        for context in (source, target):
            context.decode(more, seq_id=seq_id)
            rows.append(np.array(context.logits()))
        rig.near(rows[1], rows[0], f"sequence {seq_id} of {n} tokens, restored")


@law("KV-30", needs="kv_copy", since="1.2")
def check_single_tokens_behind_copies(rig: Rig) -> None:
    """A sequence that is removed and becomes a copy goes on as its source, token by token.

    Where parts can be copied, so does one that has a part. Whether they share cells or not.
    """
    if not rig.context().capabilities.multi_sequence:
        rig.leave("there is one sequence only")
    for unified in (None, True, False):
        fields = {} if unified is None else {"kv_unified": unified}
        with contextlib.suppress(UnsupportedFeatureError):
            _check_copies(rig, rig.two(**fields))


def _check_copies(rig: Rig, context: Any) -> None:
    for n in (3, 17, 33):
        texts = [rig.tokens(n + 3), rig.tokens(n + 3)]
        context.clear()
        for seq_id, text in enumerate(texts):
            context.decode(text[:n], seq_id=seq_id)
        for seq_id, text in enumerate(texts):
            context.decode_one(text[n], seq_id=seq_id)
        context.seq_remove(1)
        context.seq_copy(0, 1)
        expected = [rig.cold(texts[0][: n + i]) for i in (2, 3)]
        for i, row in enumerate(expected):
            for seq_id in (1, 0):
                context.decode_one(texts[0][n + 1 + i], seq_id=seq_id)
                rig.near(context.logits(), row, f"token {i} of sequence {seq_id} behind a copy")
    if context.capabilities.kv_copy == "any":
        text = rig.tokens(14)
        context.clear()
        context.decode(text[:12])
        context.seq_copy(0, 1, 0, 7)
        context.decode(text[7:], seq_id=1)
        rig.near(context.logits(), rig.cold(text), "a sequence that was copied in part")


@law("KV-33", needs="multi_sequence", since="1.2")
def check_texts_that_take_turns(rig: Rig) -> None:
    """Texts that take turns in one cache, go back and are copied in part are right, or refused.

    Longer than a window that slides, in all forms of its cache: what the window has passed may have
    gone to another text, which is no matter until somebody goes back to it.
    """
    info = rig.model.info
    window = info.sliding_window or 0
    if window > _WIDE:
        window = 0  # texts that it passes would take too long
    n = min(window + 90, (info.n_ctx_train or rig.n_ctx) // 3)
    if n < _SHORT:
        rig.leave(f"its window has room for three texts of {n} tokens only")
    wholes: tuple[bool | None, ...] = (True, False) if window else (None,)
    n_forms = 0
    for unified, whole in itertools.product((None, True, False), wholes):
        fields: dict[str, Any] = {} if whole is None else {"swa_full": whole}
        shared = {} if unified is None else {"kv_unified": unified}
        for steps in ({"n_batch": 128, "n_ubatch": 16}, {}):
            try:
                context = rig.context(n_seq_max=3, n_ctx=3 * n, **shared, **fields, **steps)
                alone = rig.context(n_ctx=3 * n, **fields, **steps)
            except UnsupportedFeatureError:
                continue
            _check_turns(rig, context, alone, n, 48 if window else 18)
            n_forms += 1
            break
    that(n_forms, "no context of three sequences can be opened")


_WIDE, _SHORT = 256, 9


def _check_turns(rig: Rig, context: Any, alone: Any, n: int, n_turns: int) -> None:
    texts = [rig.tokens(n) for _ in range(context.n_seq_max)]
    for turn in range(n_turns):
        seq_ids = [(turn + i) % len(texts) for i in range(rig.random.choice((1, 1, 2)))]
        if rig.random.randrange(3) == 0 and context.n_past(seq_ids[0]) > 1:
            other = (seq_ids[-1] + 1) % len(texts)
            texts[other] = _copied(context, seq_ids[0], other, texts)
            continue
        spans, ends = [], []
        for seq_id in seq_ids:
            end, held = rig.random.choice((n // 3, n // 2, n - 1)), context.n_past(seq_id)
            if held >= end and not context.seq_remove(seq_id, end - 1, -1):
                context.seq_remove(seq_id)
            ends.append(f"{end} tokens of sequence {seq_id}, which held {held}")
            spans.append((seq_id, texts[seq_id][context.n_past(seq_id) : end], "last"))
        context.decode_spans(spans)
        for i, (seq_id, _, _) in enumerate(spans):
            alone.clear()
            alone.decode(texts[seq_id][: context.n_past(seq_id)])
            rig.near(context.logits(i), np.array(alone.logits()), " beside ".join(ends))


def _copied(context: Any, src: int, dst: int, texts: list[list[int]]) -> list[int]:
    """Give ``dst`` the first half of ``src``, if that may be; return the text it then has."""
    half = context.n_past(src) // 2
    context.seq_remove(dst)
    with contextlib.suppress(UnsupportedFeatureError):
        context.seq_copy(src, dst, 0, half)
    n = context.n_past(dst)
    return texts[src][:n] + texts[dst][n:]


@law("KV-31", needs="kv_shift", since="1.2")
def check_a_moved_copy_leaves_its_source(rig: Rig) -> None:
    """Moving a copy leaves the sequence that it was copied from where it was, or is refused."""
    kinds = rig.context().capabilities
    if not kinds.multi_sequence or kinds.kv_copy == "none":
        rig.leave("sequences are not copied")
    tokens, more = rig.tokens(40), rig.tokens(2)
    expected = rig.cold([*tokens, more[0]])
    n_moved = 0
    for p0, unified in ((0, None), (20, None), (0, False), (20, False)):
        try:
            context = rig.two(kv_unified=unified)
            context.decode(tokens)
            context.seq_copy(0, 1)
            context.seq_shift(1, p0, -1, 9)
        except REFUSED:
            continue
        n_moved += 1
        alone = rig.context()
        alone.decode(tokens)
        alone.seq_shift(0, p0, -1, 9)
        context.decode_one(more[0], seq_id=0)
        rig.near(context.logits(), expected, "the source of a copy that was moved")
        for each, seq_id in ((context, 1), (alone, 0)):
            each.decode_one(more[0], seq_id=seq_id)
        rig.near(context.logits(), np.array(alone.logits()), f"a copy moved from {p0} on")
    if not n_moved:
        rig.leave("copies are the same cells, which are not moved")


# -- cancelling ------------------------------------------------------------------------------------


@law("CANCEL-16", since="1.2")
def check_a_callback_is_asked_at_each_step(rig: Rig) -> None:
    """A callback is asked in the midst of a call of several steps, and in batches of sequences."""
    if not rig.context().capabilities.abort:
        rig.leave("the engine is not asked to stop")
    tokens = rig.tokens(48)
    context = rig.context(n_batch=64, n_ubatch=8)
    entries = [(token, (0,), i == len(tokens) - 1) for i, token in enumerate(tokens)]
    calls = {"decode": lambda: context.decode(tokens)}
    if context.capabilities.multi_sequence:
        calls["decode_batch"] = lambda: context.decode_batch(entries)
    for name, call in calls.items():
        for n_asked in (0, 1, 2):
            context.set_abort_callback(AfterCalls(n_asked))
            error = raises(DecodeAbortedError, call, f"{name}, told to stop at question {n_asked}")
            equal(error.resident_tokens, context.n_past(), f"resident after {name}")
            that(context.n_past() < len(tokens), f"{name} was evaluated all the same")
            context.set_abort_callback(None)
            context.decode(tokens[context.n_past() :])
            rig.near(context.logits(), rig.cold(tokens), f"after {name} was stopped")
            context.clear()


# -- embeddings ------------------------------------------------------------------------------------


@law("EMB-13", needs="embeddings", since="1.2")
def check_a_token_of_two_sequences(rig: Rig) -> None:
    """A token that belongs to two sequences counts in the vectors of both.

    Spans of two sequences have the vectors that each has alone. Vectors that are kept stay as they
    were.
    """
    if not rig.context().capabilities.multi_sequence:
        rig.leave("there is one sequence only")
    _check_vectors_in_windows_of_their_own(rig)
    shared, own = rig.tokens(4), [rig.tokens(2), rig.tokens(3)]
    entries: list[Any] = [(token, (0, 1), False) for token in shared]
    entries += [(token, (i,), False) for i, text in enumerate(own) for token in text]
    for cells in ({"kv_unified": True}, {}):
        with contextlib.suppress(*REFUSED):
            context = rig.two(embeddings=True, pooling_type="mean", **cells)
            context.decode_batch(entries)
            break
    else:
        rig.leave("such tokens have no vectors here")
    by_spans = rig.two(embeddings=True, pooling_type="mean")
    by_spans.decode_spans([(i, [*shared, *text], "last") for i, text in enumerate(own)])
    for i, text in enumerate(own):
        alone = rig.context(embeddings=True, pooling_type="mean")
        alone.decode([*shared, *text])
        size = float(np.abs(alone.embedding(0)).max())
        for found, what in ((context, "sequence"), (by_spans, "span")):
            gap = float(np.abs(found.embedding(i) - alone.embedding(0)).max())
            that(gap <= 1e-2 * size, f"the vector of {what} {i} is {gap / size:.3g} of it off")
    for kind in sorted({"mean", "cls", "last"} & set(context.capabilities.pooling)):
        other = rig.two(embeddings=True, pooling_type=kind)
        for i, text in enumerate(own):
            other.decode([*shared, *text], seq_id=i)
            kept = other.embedding(i)
            before = np.array(kept)
            other.decode(own[1], seq_id=i)
            rig.same_bits(kept, before, f"a vector that was kept, pooling {kind}")


def _check_vectors_in_windows_of_their_own(rig: Rig) -> None:
    """Where sequences share no cells, each entry of a call has its vector, or it is refused."""
    ids = rig.tokens(3)
    try:
        context = rig.two(embeddings=True, pooling_type="none", kv_unified=False)
        context.decode_batch([(ids[0], (0, 1), True), (ids[1], (0,), True), (ids[2], (1,), True)])
    except REFUSED:
        return
    found = np.array(context.embeddings())
    equal(len(found), 3, "vectors of a call, one for each entry")
    for i, text in enumerate((ids[:1], ids[:2], [ids[0], ids[2]])):
        alone = rig.context(embeddings=True, pooling_type="none")
        alone.decode(text)
        expected = np.array(alone.embeddings())[-1]
        gap = float(np.abs(found[i] - expected).max() / np.abs(expected).max())
        that(gap <= 1e-2, f"the vector of entry {i} is {gap:.3g} of it off")  # noqa: PLR2004


# -- options ---------------------------------------------------------------------------------------

_ASKED: tuple[dict[str, Any], ...] = (
    {"kv_unified": True, "n_seq_max": 2},
    {"kv_unified": False, "n_seq_max": 2},
    {"n_seq_max": 5, "n_ctx": 320},
    {"n_seq_max": 3, "n_ctx": 768, "kv_unified": False},
    {"embeddings": True},
    {"embeddings": False},
    {"swa_full": True},
    {"swa_full": False},
    {"no_perf": True},
    {"offload_kqv": False},
    {"op_offload": False},
    {"attention_type": "causal"},
    {"pooling_type": "last", "embeddings": True},
    {"n_batch": 16, "n_ubatch": 16},
    {"n_batch": 48, "n_ubatch": 7},
    {"n_ubatch": 2560, "n_ctx": 2600},
    {"n_ubatch": 50, "n_batch": 50, "n_seq_max": 3, "pooling_type": "mean", "embeddings": True},
    {"yarn_orig_ctx": 100, "rope_scaling_type": "yarn", "rope_freq_scale": 0.5},
    {"yarn_ext_factor": 0.0, "rope_scaling_type": "yarn", "rope_freq_scale": 0.5},
)


OF_ROPE = (
    "rope_scaling_type", "rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor",
    "yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx",
)  # fmt: skip


def _check_told_again(rig: Rig) -> None:
    """What effective tells of rope computes the same when it is asked for."""
    tokens = rig.tokens(40)
    for fields in ({}, {"rope_scaling_type": "yarn", "rope_freq_scale": 0.25}):
        try:
            first = rig.context(**fields)
        except (InvalidInputError, UnsupportedFeatureError):
            continue
        told = {name: first.effective.get(name) for name in OF_ROPE}
        truths = [name for name, value in told.items() if isinstance(value, bool)]
        that(not truths, f"what is told of {truths} is no number")
        again = rig.context(**{name: value for name, value in told.items() if value is not None})
        for context in (first, again):
            context.decode(tokens)
        rig.near(again.logits(), first.logits(), f"logits with what is told with {fields}: {told}")


_OF_THE_MODEL: dict[str, float] = {
    "rope_freq_base": 0.0, "rope_freq_scale": 0.0, "yarn_orig_ctx": 0, "yarn_ext_factor": -1.0,
    "yarn_attn_factor": -1.0, "yarn_beta_fast": -1.0, "yarn_beta_slow": -1.0,
}  # fmt: skip


def _check_left_to_the_model(rig: Rig) -> None:
    """A value that leaves it to the model is what holds where nothing is asked for, or refused."""
    plain = rig.context().effective
    for name, value in _OF_THE_MODEL.items():
        with contextlib.suppress(*REFUSED):
            told = rig.context(**{name: value}).effective
            own = plain.get(name)
            equal(told.get(name, own), own, f"effective[{name!r}] with {name}={value}")


@law("CAP-40", since="1.2")
def check_what_is_asked_is_told(rig: Rig) -> None:
    """Each option given at opening is what effective tells, or it is refused by its name."""
    tokens, can = rig.tokens(9), rig.context().capabilities
    for names in (can.kv_types, can.pooling, can.flash_attention):
        that(isinstance(names, tuple), f"names in the capabilities are no tuple: {names!r}")
    for fields in _ASKED:
        try:
            context = rig.context(**fields)
        except OutOfMemoryError:
            that("n_ubatch" in fields, f"no memory for {fields}")
            continue
        except UnsupportedFeatureError as error:
            that(any(name in error.feature for name in fields), f"{fields}: {error.feature!r}")
            continue
        except InvalidInputError as error:
            that(error.field in fields, f"{fields} refused as {error.field!r}")
            equal(error.value, fields[error.field], f"the value that is refused of {fields}")
            that(error.allowed, f"{fields} refused, and nothing is said to be allowed")
            continue
        for name, value in fields.items():
            told = context.effective.get(name)
            if name == "n_ctx" and told is not None:
                that(told >= value, f"effective['n_ctx'] is {told} with {fields}")
            elif told is not None:
                equal(told, value, f"effective[{name!r}] with {fields}")
        context.decode(tokens)
        equal(context.n_past(), len(tokens), f"n_past with {fields}")
    for n_batch, n_ubatch in ((64, 100), (24, 500)):  # a step holds no more than a call
        with contextlib.suppress(*REFUSED):
            context = rig.context(n_batch=n_batch, n_ubatch=n_ubatch)
            what = f"steps of {context.n_ubatch} tokens in calls of {context.n_batch}"
            that(context.n_ubatch <= context.n_batch, what)
    _check_told_again(rig)
    _check_left_to_the_model(rig)
    _check_types_alone(rig)


def _check_types_alone(rig: Rig) -> None:
    """A type of K or of V alone is told as it was given, or refused."""
    own = {name: value for name, value in rig.fields(n_ctx=64).items() if name[:5] != "type_"}
    for name in ("type_k", "type_v"):
        for kind in rig.context().capabilities.kv_types:
            with contextlib.suppress(*REFUSED):
                told = rig.opened(rig.model.new_context(**own, **{name: kind})).effective
                equal(told.get(name, kind), kind, f"effective[{name!r}] with {kind} for it alone")


@law("CAP-41", since="1.2")
def check_what_is_required_is_honoured(rig: Rig) -> None:
    """Each option and call that the rig requires is honoured: the backend refuses none of them."""
    required = [name for name in rig.require if name in OPTIONS]
    if not required:
        rig.leave("the rig requires no option")
    tried = {name: refusal(rig, name) for name in required}
    found = {name: why for name, why in tried.items() if why is not None}
    equal(found, {}, "what is required, and refused")


@law("LORA-11", needs="lora", since="1.2")
def check_adapters_beside_a_control_vector(rig: Rig) -> None:
    """Adapters and a control vector count together, in whichever order they are set."""
    oracle, tokens = rig.need_oracle(), rig.tokens(8)
    n_layer, n_embd = rig.model.info.n_layer, rig.model.info.n_embd
    vector = np.asarray([rig.random.gauss(0, 0.5) for _ in range(n_embd)], np.float32)
    added, adapters = {n_layer - 1: vector}, rig.adapters_at(1.0)
    both = rig.adapted(oracle, 1.0).rows(tokens, Way(added=added))[-1]
    one = oracle.rows(tokens, Way(added=added))[-1]
    for first in ("adapters", "vector"):
        context = rig.context()
        try:
            if first == "vector":
                context.set_control_vector(added)
            context.set_adapters(adapters)
            if first == "adapters":
                context.set_control_vector(added)
        except UnsupportedFeatureError:
            rig.leave("control vectors are not supported")
        context.decode(tokens)
        rig.near(context.logits(), both, f"both, the {first} first")
        context.clear()
        context.set_adapters([])
        context.decode(tokens)
        rig.near(context.logits(), one, f"the vector alone, the {first} first")


_TURNED: dict[str, dict[str, Any]] = {
    "another rope": {"rope_freq_base": 500.0},
    "another attention": {"attention_type": "non-causal"},
}


@law("CAP-44", since="1.2")
def check_what_was_added_is_gone(rig: Rig) -> None:
    """What a context adds to a model, or changes of it, is in no context that is opened later.

    Adapters, a control vector, rows of numbers in place of tokens, another rope, another attention:
    though the later context is the model's first without them, or has them and other settings.
    """
    tokens, n_embd, last = rig.tokens(8), rig.model.info.n_embd, rig.model.info.n_layer - 1
    expected = rig.cold(tokens)
    rows = np.asarray([[rig.random.gauss(0, 0.5) for _ in range(n_embd)]], np.float32)
    added: dict[str, Callable[[Any], object]] = {
        "adapters": lambda context: context.set_adapters(rig.adapters_at(1.0)),
        "a control vector": lambda context: context.set_control_vector({last: rows[0]}),
        "rows of numbers": lambda context: context.decode_spans([(0, rows, "last")]),
        **dict.fromkeys(_TURNED, lambda _: None),
    }
    if rig.adapter is None:
        del added["adapters"]
    for what, add in added.items():
        turned = _TURNED.get(what, {})
        model, found = rig.another_model(), []
        for fields in ({}, {"embeddings": True}, {"n_threads": 2}):
            with (
                contextlib.suppress(UnsupportedFeatureError),
                model.new_context(**rig.fields(**turned, **fields)) as context,
            ):
                add(context)
                context.decode(tokens)
                found.append(np.array(context.logits()))
            with (
                contextlib.suppress(UnsupportedFeatureError),
                model.new_context(**rig.fields(**fields)) as plain,
            ):
                plain.decode(tokens)
                rig.near(plain.logits(), expected, f"a context after one with {what}")
        for row in found:
            rig.near(row, found[0], f"contexts with {what} and other settings")
        model.close()


_SMALL = 1024


@law("MEM-13", needs="plan_memory", since="1.2")
def check_plans_count_adapters(rig: Rig) -> None:
    """The plan of a context with adapters has room for them."""
    if rig.adapter is None or not rig.context().capabilities.lora:
        rig.leave("there is no adapter that can be set")
    plain, with_one = (
        rig.model.plan_memory(**rig.fields(adapters=rig.adapters_at(scale))) for scale in (0.0, 1.0)
    )
    where = Path(rig.adapter)
    files = where.rglob("*") if where.is_dir() else [where]
    size = max(file.stat().st_size for file in files)
    if size < _SMALL:
        rig.leave(f"the adapter has {size} bytes")
    missing = (AdapterSpec(path="/no/such/adapter"),)
    asked = rig.fields(adapters=missing)
    error = raises(ModelNotFoundError, lambda: rig.model.plan_memory(**asked), "no adapter")
    that("/no/such/adapter" in str(error.path), f"the path of the error is {error.path!r}")
    more = with_one.peak_bytes - plain.peak_bytes
    that(2 * more >= size, f"{more} bytes more are planned for an adapter of {size}")


@law("DEC-30", since="1.2")
def check_prompts_of_whole_steps(rig: Rig) -> None:
    """A prompt that fills a compute step or a batch to the last token gives the same row."""
    fields = {name: rig.exact[name] for name in rig.exact if name not in ("n_batch", "n_ubatch")}
    n_ctx = min(rig.model.info.n_ctx_train or 1024, 1024)
    context = rig.opened(rig.model.new_context(**{**fields, "n_ctx": n_ctx}))
    sizes = {context.n_ubatch, context.n_batch}
    for n in sorted(n for size in sizes for n in (size, size + 1) if 1 < n < n_ctx):
        tokens = rig.story_at(rig.random.randrange(99), n)
        context.clear()
        context.decode(tokens)
        row = np.array(context.logits())
        context.clear()
        context.decode(tokens[: n - n // 3])
        context.decode(tokens[n - n // 3 :])
        rig.near(context.logits(), row, f"{n} tokens, a step is {context.n_ubatch}")
