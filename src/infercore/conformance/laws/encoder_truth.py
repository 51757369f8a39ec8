"""What an encoder computes, beside another computation of the same weights; plans, aborts."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.conformance.expect import equal, raises, that
from infercore.conformance.law import law
from infercore.conformance.laws.encoders import alike, encoder_law
from infercore.errors import DecodeAbortedError, InvalidInputError, UnsupportedFeatureError
from infercore.testing import engine_of, load_reference_model
from infercore.testing.reference import pack_path

if TYPE_CHECKING:
    from infercore.conformance.rig import Rig

law_of_today: dict[str, Any] = {**encoder_law, "since": "1.2"}


@law("ENC-12", **law_of_today)
def check_vectors_of_every_length(rig: Rig) -> None:
    """Rows and vectors of 1 to as many tokens as fit are those of the reference computation."""
    if rig.encoder_name is None:
        rig.leave("the encoder is none of the pack's")
    model, n_vocab = rig.encoder_model, rig.encoder_model.info.n_vocab
    most = min(250, model.info.n_ctx_train)
    texts = [[rig.random.randrange(5, n_vocab) for _ in range(n)] for n in (1, 2, 31, 64, 65, most)]
    texts += [[5, 0, 7], [0], [0, 5], [6, 4, 3, 2, 1, 0]]  # the first ids are tokens like others
    oracle: Any = rig.opened(load_reference_model(pack_path(rig.encoder_name)))
    rows = rig.encoder_context(pooling_type="none")
    with oracle.new_context(pooling_type="none") as expected:
        for text in texts:
            rows.encode(text)
            expected.encode(text)
            found, right = np.array(rows.embeddings()), np.array(expected.embeddings())
            for i in {0, len(text) // 2, len(text) - 1}:
                alike(found[i], right[i], f"row {i} of {len(text)} tokens")
    for kind in sorted({"mean", "cls", "last"} & set(model.capabilities.pooling)):
        pooled = rig.encoder_context(pooling_type=kind)
        with oracle.new_context(pooling_type=kind) as expected:
            for text in texts:
                pooled.encode(text)
                expected.encode(text)
                right = np.array(expected.embedding())
                alike(np.array(pooled.embedding()), right, f"{len(text)} tokens, {kind}")


_OTHERS: dict[str, Any] = {
    "attention_type": "causal", "type_k": "f16", "embeddings": False, "rope_freq_base": 5000.0,
}  # fmt: skip
"""Options of which an encoder may have nothing: it refuses them then."""


@law("ENC-13", **law_of_today)
def check_settings_of_an_encoder(rig: Rig) -> None:
    """Flash attention and threads leave an encoder's vectors as they are, and are in force.

    Where the rig requires ``flash_attn``, a bit differs between "on" and "off". Embeddings can be
    switched on, as they are, and off or not at all.
    """
    text = [5 + i % 90 for i in range(min(150, rig.encoder_model.info.n_ctx_train))]
    kinds = rig.encoder_model.capabilities
    settings: list[dict[str, Any]] = [{"flash_attn": kind} for kind in kinds.flash_attention]
    settings += [{"n_threads": 2, "n_threads_batch": 2}]
    usual = rig.encoder_context(pooling_type="mean")
    usual.encode(text)
    plain = np.array(usual.embedding())
    told: dict[str, bytes] = {}
    for fields in settings:
        try:
            context = rig.encoder_context(pooling_type="mean", **fields)
        except UnsupportedFeatureError:
            continue
        context.encode(text)
        vector = np.array(context.embedding())
        alike(vector, plain, f"with {fields}")
        flash = context.effective.get("flash_attn")
        if "flash_attn" in fields and flash is not None:
            that(flash in {"on", "off"}, f"effective['flash_attn'] is {flash!r}")
            if fields["flash_attn"] in {"on", "off"}:
                equal(flash, fields["flash_attn"], "effective['flash_attn']")
            told[flash] = vector.tobytes()
        if "n_threads" in fields:
            equal(context.effective.get("n_threads", 2), 2, "effective['n_threads']")
    if {"on", "off"} <= told.keys() and "flash_attn" in rig.require:
        differs = told["on"] != told["off"]
        that(differs, "flash_attn='on' changes not a bit; effective says it is on")
    for name, value in _OTHERS.items():
        with contextlib.suppress(UnsupportedFeatureError, InvalidInputError):
            told = rig.encoder_context(**{name: value}).effective
            equal(told.get(name, value), value, f"effective[{name!r}]")
    attention = rig.encoder_context().effective.get("attention_type", "causal")
    that(attention in {"causal", "non-causal"}, f"effective['attention_type'] is {attention!r}")
    _check_switches(rig, text, plain)


def _check_switches(rig: Rig, text: list[int], plain: Any) -> None:
    context = rig.encoder_context(pooling_type="mean", embeddings=True)
    context.set_embeddings(True)
    context.encode(text)
    alike(np.array(context.embedding()), plain, "with embeddings switched on")
    that(context.effective.get("embeddings") is not False, "effective says that there are none")
    with contextlib.suppress(UnsupportedFeatureError):
        context.warmup()
    context.seq_remove(0)
    context.encode(text)
    alike(np.array(context.embedding()), plain, "after a warm-up")
    try:
        context.set_embeddings(False)
    except UnsupportedFeatureError as error:
        equal(error.backend, rig.backend, "the backend that refuses to switch embeddings off")
        that(context.effective.get("embeddings") is not False, "refused, and effective is changed")
        context.encode(text)
        alike(np.array(context.embedding()), plain, "after embeddings could not be switched off")
    else:
        found = context.effective.get("embeddings")
        that(found is False, f"switched off, and effective['embeddings'] is {found!r}")


@law("ENC-14", **law_of_today)
def check_the_plan_of_an_encoder(rig: Rig) -> None:
    """An encoder's memory plan has its weights and more for longer texts; or it is refused."""
    model = rig.encoder_model
    try:
        plan = model.plan_memory(n_ctx=model.info.n_ctx_train)
    except UnsupportedFeatureError:
        return
    size = model.info.size_bytes
    fits = size // 2 <= plan.weights_bytes <= 4 * size
    that(fits, f"{plan.weights_bytes} bytes of weights, {size} in the files")
    total = plan.weights_bytes + plan.kv_bytes + plan.compute_bytes
    equal(plan.total_bytes, total, "total_bytes")
    that(plan.peak_bytes >= total, f"a peak of {plan.peak_bytes} below the total of {total}")
    that(plan.n_ctx <= model.info.n_ctx_train, f"a window of {plan.n_ctx}")
    most = 2**28 + 64 * model.info.n_embd * model.info.n_ctx_train * 4
    that(0 <= plan.kv_bytes + plan.compute_bytes <= most, f"a plan of {plan}")


@law("ENC-15", **law_of_today)
def check_an_aborted_encoder(rig: Rig) -> None:
    """A callback or the engine's own abort ends a text; the encoder goes on afterwards."""
    text = [5 + i % 90 for i in range(20)]
    context = rig.encoder_context(pooling_type="mean")
    context.encode(text)
    vector = np.array(context.embedding())
    context.set_abort_callback(lambda: True)
    error = raises(DecodeAbortedError, lambda: context.encode(text), "an aborted text")
    equal(error.resident_tokens, 0, "tokens resident after an aborted text")
    context.set_abort_callback(None)
    if context.capabilities.abort:
        engine = engine_of(context)
        engine.abort()
        raises(DecodeAbortedError, lambda: context.encode(text), "an engine told to abort")
        engine.clear_abort()
    context.encode(text)
    rig.same_bits(np.array(context.embedding()), vector, "the text after an abort")


@law("ENC-16", **law_of_today)
def check_the_bytes_of_an_encoders_tokens(rig: Rig) -> None:
    """The bytes of an encoder's tokens, but for control tokens, are the words of the text."""
    tokenizer = rig.encoder_model.tokenizer
    for text in ("the little fox ran home", "unbelievable stories quickly told", "a"):
        ids = tokenizer.encode(text)
        said = [tokenizer.token_bytes(token) for token in ids if not tokenizer.is_control(token)]
        equal(b"".join(said).decode().split(), text.split(), "the words of the tokens")
        equal(tokenizer.decode(ids, skip_special=True).split(), text.split(), "the text decoded")
