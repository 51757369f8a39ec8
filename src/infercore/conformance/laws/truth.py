"""What a backend says of itself is so."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

import infercore
from infercore.conformance.expect import equal, raises, that
from infercore.conformance.law import law
from infercore.conformance.oracle import Way
from infercore.errors import InferCoreError, InvalidInputError, UnsupportedFeatureError
from infercore.values.config import AdapterSpec, ContextConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from infercore.conformance.rig import Rig

NOT_REPORTED = ("on_oom", "n_ctx_min", "backend_options", "defrag_thold", "adapters")


@law("CAP-1", model="any")
def check_kinds_of_a_default_context(rig: Rig) -> None:
    """A model's capabilities are those of a context with the default config."""
    with rig.model.new_context() as context:
        equal(context.capabilities, rig.model.capabilities, "capabilities")


@law("CAP-2", model="any")
def check_model_info(rig: Rig) -> None:
    """A model reports its shape as far as it is known, and it agrees with its tokenizer."""
    info = rig.model.info
    equal(info.n_vocab, rig.tokenizer.n_vocab, "n_vocab")
    that(info.architecture, "the architecture has no name")
    heads = () if info.is_recurrent and not info.is_hybrid else ("n_head", "n_head_kv")
    for name in ("n_ctx_train", "n_embd", "n_layer", *heads):
        that(getattr(info, name) >= 0, f"{name} is {getattr(info, name)}")  # 0: not known
    that(isinstance(dict(info.metadata), dict), "metadata is no mapping")


@law("CAP-3", model="any")
def check_digest_of_the_model(rig: Rig) -> None:
    """A model's digest is SHA-256 hex."""
    digest = rig.model.digest
    that(len(digest) == 64 and set(digest) <= set("0123456789abcdef"), f"digest {digest!r}")  # noqa: PLR2004


@law("CAP-4", model="any")
def check_name_of_the_backend(rig: Rig) -> None:
    """A model says which backend loaded it."""
    equal(rig.model.backend, rig.backend, "the backend's name")


@law("CAP-5")
def check_effective_holds_every_field(rig: Rig) -> None:
    """What was set is in force, and sizes that were not set are reported too.

    Keys, values and operations are said to be offloaded only where there is a device to take them.
    """
    context = rig.context(n_batch=32, n_ubatch=16)
    for field, value in {**rig.exact, "n_batch": 32, "n_ubatch": 16}.items():
        if field not in NOT_REPORTED:
            equal(context.effective.get(field), value, f"effective[{field!r}]")
    equal((context.n_batch, context.n_ubatch), (32, 16), "n_batch and n_ubatch")
    plain = rig.opened(rig.model.new_context(n_ctx=64)).effective
    for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_threads"):
        that(plain.get(name) is not None, f"effective lacks {name!r}, where nobody set it")
        that(plain[name] >= 1, f"effective[{name!r}] is {plain[name]!r}")
    that(context.effective["n_ctx"] >= rig.n_ctx, "the engine's window is smaller than asked for")
    if not context.capabilities.gpu_offload and not _has_another_device(rig):
        for name in ("offload_kqv", "op_offload"):
            told = plain.get(name)
            that(not told, f"effective[{name!r}] is {told!r}, and there is no device but a CPU")


def _has_another_device(rig: Rig) -> bool:
    found = [b.devices for b in infercore.backends(devices=True) if b.name == rig.backend]
    return any(device.kind != "cpu" for devices in found for device in devices)


@law("CAP-6")
def check_effective_is_of_known_fields(rig: Rig) -> None:
    """Each option of the contract that an engine reports has a value the option allows."""
    context = rig.context()
    for field in attrs.fields(ContextConfig):
        value = context.effective.get(field.name)
        if value is None or field.name in NOT_REPORTED:
            continue
        ContextConfig(**{field.name: value})


@law("CAP-7")
def check_tolerance_is_kept(rig: Rig) -> None:
    """A context states its tolerance, and with the exact settings it is the rig's or less."""
    context = rig.context()
    that(0 <= context.tolerance <= rig.tolerance, f"the tolerance {context.tolerance}")


@law("CAP-8")
def check_kv_types(rig: Rig) -> None:
    """Every declared type of KV cache opens, decodes and is reported."""
    own = {name: rig.exact[name] for name in ("backend_options", "precision") if name in rig.exact}
    for kind in rig.context().capabilities.kv_types:
        fields = {**own, "type_k": kind, "n_ctx": 64}
        if kind in ("f32", "f16", "bf16"):
            fields["type_v"] = kind
        context = _opened(rig, fields, f"type_k={kind!r}")
        equal(context.effective["type_k"], kind, "effective type_k")
        context.decode(rig.tokens(4))


def _opened(rig: Rig, fields: dict[str, Any], what: str) -> Any:
    """Open a context of which each declared value must be accepted, alone or with its like."""
    try:
        return rig.opened(rig.model.new_context(**fields))
    except InvalidInputError:
        kind = fields.get("type_k")
        paired = {**fields, "type_v": kind, "flash_attn": "on"}
        return rig.opened(rig.model.new_context(**paired))
    except UnsupportedFeatureError as error:
        that(condition=False, text=f"{what} is declared, and refused: {error}")


@law("CAP-9")
def check_flash_attention(rig: Rig) -> None:
    """Every declared setting of flash attention opens and decodes."""
    for setting in rig.context().capabilities.flash_attention:
        context = _opened(rig, {"flash_attn": setting, "n_ctx": 64}, f"flash_attn={setting!r}")
        context.decode(rig.tokens(4))
        equal(context.n_past(), 4, "n_past")


@law("CAP-10")
def check_poolings(rig: Rig) -> None:
    """Every declared pooling opens and is reported."""
    for kind in rig.context().capabilities.pooling:
        context = _opened(rig, {"pooling_type": kind, "n_ctx": 64}, f"pooling {kind!r}")
        equal(context.pooling_type, kind, "pooling_type")


@law("CAP-11")
def check_perf_counts(rig: Rig) -> None:
    """Counters report how many tokens were prefilled and decoded, and can be reset."""
    context = rig.context()
    context.decode(rig.tokens(9))
    for token in rig.tokens(3):
        context.decode_one(token)
    counters = context.perf()
    equal((counters.prefill_tokens, counters.decode_tokens), (9, 3), "prefilled and decoded")
    that(counters.prefill_ms > 0 and counters.decode_ms > 0, f"times of {counters}")
    context.reset_perf()
    after = context.perf()
    equal((after.prefill_tokens, after.decode_tokens), (0, 0), "counts after a reset")


@law("CAP-12", tier="session")
def check_reuse_is_counted(rig: Rig) -> None:
    """A session's reuse shows in the counters of its context, and evaluation does too."""
    if rig.in_pool:
        rig.leave("the counters of a pool are its stats")
    session, text = rig.session(), rig.passage(12)
    context = rig.inner(session)
    n = session.ensure_prefix(text).prefix_tokens
    session.ensure_prefix(text)
    counters = context.perf()
    equal((counters.prefill_tokens, counters.reused_tokens), (n, n), "prefilled and reused")


@law("CAP-13")
def check_no_perf(rig: Rig) -> None:
    """With no_perf the counters are refused, not made up."""
    context = rig.context(no_perf=True)
    context.decode(rig.tokens(3))
    raises(UnsupportedFeatureError, context.perf, "perf() with no_perf=True")


@law("CAP-14")
def check_warmup(rig: Rig) -> None:
    """Warmup keeps what is resident, or refuses."""
    tokens, more = rig.tokens(6), rig.tokens(2)
    context = rig.context()
    context.decode(tokens)
    try:
        context.warmup()
    except UnsupportedFeatureError:
        equal(context.tokens(), tokens, "the tokens after a refusal")
    context.decode(more)
    rig.near(context.logits(), rig.cold(tokens + more), "logits after a warm-up")
    fresh = rig.context()
    with contextlib.suppress(UnsupportedFeatureError):
        fresh.warmup()
    equal((fresh.tokens(), fresh.n_past(), fresh.n_outputs), ([], 0, 0), "after one on nothing")
    fresh.decode(tokens)
    rig.near(fresh.logits(), rig.cold(tokens), "logits after a warm-up on nothing")


@law("CAP-15")
def check_causal_attention(rig: Rig) -> None:
    """Setting causal attention to what it is changes nothing; switching it works or is refused."""
    tokens = rig.tokens(6)
    context = rig.context()
    context.set_causal_attention(True)
    context.decode(tokens)
    rig.near(context.logits(), rig.cold(tokens), "logits with causal attention set")
    try:
        context.set_causal_attention(False)
    except UnsupportedFeatureError as error:
        that(error.feature, "the refusal does not say what is refused")
        equal(error.backend, rig.backend, "the backend that refuses it")
        return
    told = context.effective.get("attention_type", "non-causal")
    equal(told, "non-causal", "effective attention_type once it was switched off")
    context.clear()
    context.decode(tokens)
    that(context.n_past() == len(tokens), "nothing was decoded without causal attention")
    oracle = rig.live_oracle()
    if oracle is not None:
        expected = oracle.rows(tokens, Way(causal=False))[-1]
        rig.near(context.logits(), expected, "logits once causal attention was switched off")


@law("CAP-16", needs="lora")
def check_adapters(rig: Rig) -> None:
    """An empty list means no adapters; one without a file raises a typed error, state unchanged."""
    tokens = rig.tokens(5)
    context = rig.context()
    context.set_adapters([])
    context.decode(tokens)
    rig.near(context.logits(), rig.cold(tokens), "logits without adapters")
    with rig.unchanged(context):
        raises(
            InferCoreError,
            lambda: context.set_adapters([AdapterSpec(path="/no such adapter")]),
            "an adapter that is not there",
        )


@law("CAP-19", since="1.1")
def check_flash_attention_computes_the_same(rig: Rig) -> None:
    """With every declared setting of flash attention the logits are those without it.

    Where "on" and "off" are both told to be in force, a bit of them differs, or the plan where the
    rig does not require ``flash_attn``: an engine in which nothing does tells what holds in
    ``effective``, or declares one setting.
    """
    rig.need_all_logits()
    settings = rig.context().capabilities.flash_attention
    if "off" not in settings or len(settings) == 1:
        rig.leave("flash attention cannot be switched on and off")
    tokens, rows = rig.tokens(rig.n_ctx - 56), {}  # more than one block of cells
    told: dict[str, Any] = {}
    for setting in settings:
        context = rig.context(flash_attn=setting)
        context.decode(tokens)
        rows[setting] = (np.array(context.logits()), context.tolerance)
        told[setting] = context.effective.get("flash_attn")
    plain, exact = rows["off"]
    if (told.get("on"), told["off"]) == ("on", "off"):
        alike = np.array_equal(rows["on"][0], plain)
        differs = not alike or ("flash_attn" not in rig.require and _plans_apart(rig))
        that(differs, "flash_attn='on' changes not a bit, nor the plan; effective says it is on")
    for setting, (row, tolerance) in rows.items():
        gap, allowed = float(np.abs(row - plain).max()), max(tolerance, exact, rig.tolerance)
        that(gap <= allowed, f"flash_attn={setting!r}: logits {gap:.3g} off, beyond {allowed:.3g}")


def _plans_apart(rig: Rig) -> bool:
    try:
        plans = [rig.model.plan_memory(**rig.fields(flash_attn=kind)) for kind in ("on", "off")]
    except UnsupportedFeatureError:
        return False
    return bool(plans[0].compute_bytes != plans[1].compute_bytes)


@law("CAP-20", since="1.1")
def check_kv_types_are_in_use(rig: Rig) -> None:
    """Every declared type of KV cache rounds in its own way: no two give the same bits."""
    kinds = rig.context().capabilities.kv_types
    if len(kinds) < 2:  # noqa: PLR2004
        rig.leave("there is one type of KV cache only")
    tokens = rig.tokens(40)
    found: dict[bytes, str] = {}
    for kind in kinds:
        context = _of_kind(rig, kind)
        context.decode(tokens[:-3])
        context.decode(tokens[-3:])  # an engine may not read its cache before
        bits = np.array(context.logits()).tobytes()
        that(bits not in found, f"type_k={kind!r} gives the bits of {found.get(bits)!r}")
        found[bits] = kind


def _of_kind(rig: Rig, kind: str) -> Any:
    """Open a context with keys of that type; with values too where they must be alike."""
    alike = {"type_k": kind, "type_v": kind}
    for fields in ({"type_k": kind}, alike):
        with contextlib.suppress(InvalidInputError, UnsupportedFeatureError):
            return rig.context(**fields)
    return rig.context(**alike, flash_attn="on")


@law("CAP-17")
def check_synchronize(rig: Rig) -> None:
    """Synchronize waits and changes nothing."""
    context = rig.context()
    context.decode(rig.tokens(5))
    with rig.unchanged(context):
        context.synchronize()


@law("CAP-18")
def check_every_capability_is_true(rig: Rig) -> None:
    """Each declared feature works in its smallest call; each undeclared one refuses that call."""
    kinds = rig.context().capabilities
    tokens = rig.tokens(8)
    for name, call in _SMALLEST.items():
        context = rig.context()
        context.decode(tokens)
        if getattr(kinds, name) not in (False, "none"):
            call(context)
        else:
            with rig.unchanged(context, f"the context that refused {name}"):
                raises(UnsupportedFeatureError, partial(call, context), f"undeclared {name}")


_SMALLEST: dict[str, Callable[[Any], object]] = {
    "kv_copy": lambda context: context.seq_copy(0, 0),
    "kv_shift": lambda context: context.seq_shift(0, 0, -1, 1),
    "kv_divide": lambda context: context.seq_divide(0, 0, -1, 2),
    "multi_sequence": lambda context: context.decode_batch([(context.tokens()[0], (0,), True)]),
    "state": lambda context: context.save_state(),
    "sequence_state": lambda context: context.save_sequence(0),
    "logits_all": lambda context: context.decode(context.tokens()[:2], logits="all"),
    "embeddings": lambda context: context.set_embeddings(True),
    "encoder": lambda context: context.encode(context.tokens()[:2]),
    "live_threads": lambda context: context.set_threads(1),
    "lora": lambda context: context.set_adapters([]),
}
