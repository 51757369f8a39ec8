"""What a `ContextConfig` means here: each field is taken over, or refused by name."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from infercore import UnsupportedFeatureError
from infercore_openvino import arithmetic, cpu, options, rope
from infercore_openvino.engine import BACKEND
from infercore_openvino.facts import asked_window, trained_window

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infercore import AdapterSpec, ContextConfig
    from infercore_openvino.arithmetic import Arithmetic
    from infercore_openvino.files import ModelFiles
    from infercore_openvino.rope import Rope

DEFAULT_DEVICE = "CPU"
DEFAULT_N_BATCH = 2048
DEFAULT_N_UBATCH = 512
MAX_OWN_STREAMS = 4  # of one compiled graph, unless num_streams says otherwise
NO_KV_TYPES = ("f32",)  # without keys and values
POOLING, RANK = ("none", "mean", "cls", "last"), "rank"
FLASH_ATTENTION = ("auto", "off")

# How far logits may move in another split, by the format of products and that of the cache. Exact
# arithmetic differs in its order of summation only; a cache in fewer bits is read back rounded.
# Measured on the trained storyteller (logits span 31) and on random models of 24 layers: 2.4e-5
# with f32, 0.016 (0.044 with tied embeddings, stateful) with f16, 0.041 with u8 (32 layers: 0.081).
_TOLERANCE = {("f32", "f32"): 1e-3, ("f32", "f16"): 6e-2, ("f32", "u8"): 0.15}
# What is rounded to 8 bits moves by a step where a value lies at the edge of two, and each layer
# reads what the one before it made of it: 0.17 on 4 layers, 0.56 on 24, 1.45 on 32.
_ROUGH_TOLERANCE, _OF_LAYER = 0.3, 0.08

_HINTS = {
    "attention_type": "the exported graph has its kind of attention built in; leave it out",
    "flash_attn": "attention is exact, in blocks; leave flash_attn at 'auto' or 'off'",
    "offload_kqv": "the cache is in the memory of the device",
    "op_offload": "all operations run on one device",
    "swa_full": "the whole cache is always kept",
}
_NO_MIX = (
    "it has no effect where YaRN mixes no frequencies; give rope_scaling_type='yarn' and a "
    "rope_freq_scale below 1 too"
)
_TO_A_GPU = {"offload_kqv", "op_offload"}  # of a model with layers there: the graph is not split


@dataclass(frozen=True)
class Settings:
    """The settings of one context. None leaves the choice to the engine."""

    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_seq_max: int
    kv_unified: bool
    kv_type: str
    arithmetic: Arithmetic
    form: str | None
    n_threads: int | None
    n_streams: int
    embeddings: bool
    pooling: str
    timed: bool
    kv_types: tuple[str, ...]
    properties: Mapping[str, Any]
    adapters: Sequence[AdapterSpec] = ()
    rope: Rope | None = None
    causal: bool = True
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def inference(self) -> str:
        """The number format of products and sums."""
        return self.arithmetic.inference

    def tolerance(self, *, rounded: bool, n_layer: int) -> float:
        """Return the bound that contexts state; ``rounded``: activations are in 8 bits."""
        rough = _ROUGH_TOLERANCE + _OF_LAYER * n_layer
        if rounded:
            return rough
        return _TOLERANCE.get((self.inference, self.kv_type), rough)


def settings(
    config: ContextConfig,
    files: ModelFiles,
    *,
    device: str = DEFAULT_DEVICE,
    attention: str = "causal",
) -> Settings:
    """Return the settings that ``config`` asks for. ``attention`` is that of the graph.

    ``kv_types`` has the types that go with the inference precision.
    Raises `UnsupportedFeatureError` for a field that cannot be honoured, `InvalidInputError`
    for a backend option of a wrong value.
    """
    chosen = dict(config.backend_options)
    options.check(chosen, options.CONTEXT_OPTIONS)
    causal = not (files.has_cache and config.attention_type == "non-causal")
    attention = attention if causal else "non-causal"
    turning, rotary = rope.in_force(config, files.config, trained_window(files))
    fixed = {**turning, **_FIXED, "attention_type": attention}
    _refuse(config, fixed, (RANK,) if files.ranks else POOLING)
    unused = rope.unused(rope.asked_of(config), fixed, trained_window(files))
    if unused is not None:
        raise _unsupported(unused, getattr(config, unused), _NO_MIX)
    if rotary is not None:
        _check_rope(rotary.named, config, files, fixed)
    n_threads = _n_threads(config)
    n_streams = _n_streams(config)
    numbers = arithmetic.asked(config, device, n_threads=n_threads)
    inference = numbers.inference
    kv_types = arithmetic.kv_types(config, inference) if files.has_keys else NO_KV_TYPES
    if files.is_recurrent:  # the saved state of a cache in 8 bits would not be exact
        kv_types = tuple(kind for kind in kv_types if kind != "u8")
    kv_type = _kv_type(config, inference, kv_types)
    n_batch = config.n_batch or max(DEFAULT_N_BATCH, config.n_ubatch or 0)
    pools = config.pooling_type not in {None, "none"}
    embeddings = pools if config.embeddings is None else config.embeddings
    # what is pooled must fit one step
    usual_step = n_batch if pools and embeddings else DEFAULT_N_UBATCH
    return Settings(
        n_ctx=asked_window(config, files),
        n_batch=n_batch,
        n_ubatch=min(n_batch, config.n_ubatch or usual_step),
        n_seq_max=config.n_seq_max or 1,
        kv_unified=config.kv_unified is not False,  # so forks need no room of their own
        kv_type=kv_type,
        arithmetic=numbers,
        form=chosen.get("form"),
        n_threads=n_threads,
        n_streams=n_streams,
        embeddings=embeddings,
        pooling=config.pooling_type or "none",
        timed=config.no_perf is not True,
        kv_types=kv_types,
        properties=_properties(chosen, numbers, kv_type, n_threads, n_streams),
        adapters=config.adapters,
        rope=rotary,
        causal=causal,
        fixed=fixed,
    )


_FIXED = {"offload_kqv": False, "op_offload": False, "swa_full": True}
"""Fields that the engine decides, with the value in force."""


def _check_rope(
    named: str, config: ContextConfig, files: ModelFiles, fixed: Mapping[str, Any]
) -> None:
    """Refuse frequencies that cannot be computed anew for this model."""
    kind = rope.parameters(files.config)["rope_type"]
    hint = None
    if fixed["rope_scaling_type"] == "longrope":
        hint = "it needs factors that only a model trained with it has"
    elif not files.has_cache:
        hint = "an encoder's graph has its positions built in; leave it out"
    elif kind not in rope.OWN_KINDS:
        hint = f"the model's own frequencies are of kind {kind!r}; leave it out"
    elif not fixed["rope_freq_base"]:
        hint = "the model's files name no rope_theta; leave it out"
    elif fixed["yarn_ext_factor"] and not fixed["yarn_orig_ctx"]:
        hint = "the model's files name no trained window; give yarn_orig_ctx"
    if hint is not None:
        raise _unsupported(named, getattr(config, named), hint)


def _refuse(config: ContextConfig, fixed: Mapping[str, Any], pooling: Sequence[str]) -> None:
    for name in ("attention_type", *_FIXED):
        asked, in_force = getattr(config, name), fixed[name]
        if asked is not None and asked != in_force and name not in _TO_A_GPU:
            raise _unsupported(name, asked)
    if config.flash_attn == "on":
        raise _unsupported("flash_attn", "on")
    if config.pooling_type not in {None, *pooling}:
        hint = f"this model has no head for it; give one of {', '.join(map(repr, pooling))}"
        raise _unsupported("pooling_type", config.pooling_type, hint)


def _unsupported(name: str, asked: object, hint: str = "") -> UnsupportedFeatureError:
    hint = hint or _HINTS[name]
    return UnsupportedFeatureError(
        f"{name}={asked!r} is not supported on backend {BACKEND!r}; {hint}",
        feature=name,
        backend=BACKEND,
        hint=hint,
    )


def _kv_type(config: ContextConfig, precision: str, allowed: tuple[str, ...]) -> str:
    """Keys and values have one type, and it must go with the inference precision."""
    asked = {name: getattr(config, name) for name in ("type_k", "type_v")}
    for name, value in asked.items():
        if value is not None and value not in allowed:
            hint = f"with inference precision {precision} give {allowed}"
            if value.startswith("q8") and "u8" in allowed:
                hint = f"8 bits are called 'u8' here; {hint}"
            raise _unsupported(name, value, hint)
    k, v = asked["type_k"], asked["type_v"]
    if k and v and k != v:
        raise _unsupported("type_v", v, f"keys and values have one type here; give {k!r}")
    usual = [kind for kind in arithmetic.KV_TYPES[precision] if kind in allowed]
    return str(k or v or ("f16" if "f16" in usual else (usual or allowed)[0]))


def _n_threads(config: ContextConfig) -> int | None:
    n, n_batch = config.n_threads, config.n_threads_batch
    if n and n_batch and n != n_batch:
        hint = f"one number of threads does all work here; give {n}, or leave it out"
        raise _unsupported("n_threads_batch", n_batch, hint)
    return n or n_batch or cpu.granted_threads()


def _n_streams(config: ContextConfig) -> int:
    """Return the contexts of one compiled graph that can run at a time, each on its threads.

    Where a context is set to leave cores alone, contexts in other threads take those.
    """
    asked = config.n_threads or config.n_threads_batch
    if asked is None or "num_streams" in config.backend_options:
        return 1
    return _own_streams(asked)


def _own_streams(n_threads: int) -> int:
    return max(1, min(MAX_OWN_STREAMS, cpu.usable_cores() // n_threads))


def with_threads(settings: Settings, n: int) -> Settings:
    """Return ``settings`` of a context that computes on ``n`` threads."""
    n_streams = settings.n_streams
    if n_streams > 1 or "NUM_STREAMS" not in settings.properties:  # else the user's own
        n_streams = _own_streams(n)
    given = dict(settings.properties)
    given["INFERENCE_NUM_THREADS"] = n * n_streams
    if n_streams > 1:
        given["NUM_STREAMS"] = n_streams
    elif settings.n_streams > 1:
        del given["NUM_STREAMS"]
    return replace(settings, n_threads=n, n_streams=n_streams, properties=given)


def _properties(
    chosen: Mapping[str, Any],
    numbers: Arithmetic,
    kv_type: str,
    n_threads: int | None,
    n_streams: int,
) -> dict[str, Any]:
    """The engine's compile properties; two contexts with the same ones share a compiled graph."""
    found: dict[str, Any] = {
        **numbers.properties(),
        "KV_CACHE_PRECISION": kv_type,
    }
    if (
        kv_type == "u8"
    ):  # a scale for each token, so that removing one leaves the others as they are
        found["KEY_CACHE_QUANT_MODE"] = "BY_TOKEN"
    if n_threads is not None:
        found["INFERENCE_NUM_THREADS"] = n_threads * n_streams
    if n_streams > 1:
        found["NUM_STREAMS"] = n_streams
    for name in ("num_streams", "enable_hyper_threading", "enable_cpu_pinning"):
        if name in chosen:
            found[name.upper()] = chosen[name]
    return found
