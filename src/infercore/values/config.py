"""What a caller asks for: model, context, sampling and decode configs."""

from __future__ import annotations

import math
import os  # noqa: TC003  (attrs resolves annotations)
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import attrs

from infercore.errors import InvalidInputError, UnsupportedFeatureError
from infercore.values import checks
from infercore.values.field_texts import lists_fields

if TYPE_CHECKING:
    from typing import TypeAlias

    from typing_extensions import Self

KnownKVType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl", "u8"]
KV_TYPES: tuple[str, ...] = get_args(KnownKVType)
QUANTISED_KV_TYPES = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
PoolingType = Literal["none", "mean", "cls", "last", "rank"]
POOLING_TYPES: tuple[str, ...] = get_args(PoolingType)
PRECISIONS = ("default", "accurate", "fast")
ROPE_SCALING_TYPES = ("none", "linear", "yarn", "longrope")
MAX_SEQUENCES = 256
MAX_THREADS = 512
MAX_SEED = 2**32 - 2
_MOST = 3.4028234663852886e38  # that float32 holds, as logits are


class KVType(str):
    """The name of a number format for the KV cache; it may be one that only a plugin knows.

    >>> config = ContextConfig(type_k=KVType("fp8_e4m3"))

    It compares like its text. A model's `Capabilities.kv_types` lists the types it accepts; opening
    a context with another raises `UnsupportedFeatureError`. Raises `InvalidInputError` for an empty
    name.
    """

    __slots__ = ()

    def __new__(cls, name: str) -> Self:
        """Return the type called ``name``."""
        if not checks.check_text("KVType", name):
            raise checks.refuse("KVType", name, "the name of a type, such as 'f16'")
        return super().__new__(cls, name)

    def __repr__(self) -> str:
        return f"KVType({str(self)!r})"


def _kv_type(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Refuse a plain name that is not known: more often it is a slip than a plugin's own."""
    if value is None or isinstance(value, KVType):
        return
    if type(value) is not str or value not in KV_TYPES:
        known = ", ".join(repr(kind) for kind in KV_TYPES)
        raise checks.refuse(
            attribute.name, value, f"one of {known}, or KVType(name) for a plugin's own type"
        )


def _options(value: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise checks.refuse("backend_options", value, "a mapping of option names to values")
    return checks.frozen_mapping(value)


def _tensor_split(value: Sequence[float] | None) -> tuple[float, ...] | None:
    if value is None:
        return None
    split = checks.items("tensor_split", value, "a sequence of numbers, one a device")
    if not split or any(not checks.is_finite(part) or part < 0 for part in split):
        raise checks.refuse("tensor_split", value, "a sequence of numbers of at least 0")
    return tuple(float(part) for part in split)


def _callable(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value is not None and not callable(value):
        raise checks.refuse(attribute.name, value, "a callable or None")


@lists_fields("ModelConfig")
@attrs.frozen(kw_only=True, field_transformer=checks.plain_numbers)
class ModelConfig:
    """How to load a model. None leaves the choice to the backend.

    ``n_gpu_layers`` counts layers put on the GPU (-1 = all), ``tensor_split`` gives each device's
    share, ``split_mode`` is "none", "layer" or "row". ``device`` names a device of the backend
    (see `BackendInfo.devices`). ``progress`` is called with the fraction loaded, 0.0 to 1.0; a
    return value of False cancels. ``backend_options`` are options of one engine. With ``use_mmap``
    (the engines' default) weights are pages of the file, read when they are used: a file that is
    cut short or overwritten in place after loading ends the process (SIGBUS), which nothing can
    catch. Replace model files by renaming, or load with ``use_mmap=False``.

    ``check_in_child``: some corrupt files make engines end the process. None tries a file that was
    not seen before in a child process, which has ended before this one loads the file; True tries
    it every time, False never. A file that kills the child raises `ModelFormatError`.
    """

    n_gpu_layers: int | None = attrs.field(default=None, validator=checks.integer(-1, 2**31 - 1))
    split_mode: Literal["none", "layer", "row"] | None = attrs.field(
        default=None, validator=checks.one_of("none", "layer", "row")
    )
    main_gpu: int | None = attrs.field(default=None, validator=checks.integer(0, 255))
    tensor_split: tuple[float, ...] | None = attrs.field(default=None, converter=_tensor_split)
    device: str | None = attrs.field(default=None, validator=checks.text(optional=True))
    use_mmap: bool | None = attrs.field(default=None, validator=checks.boolean())
    use_mlock: bool | None = attrs.field(default=None, validator=checks.boolean())
    check_tensors: bool | None = attrs.field(default=None, validator=checks.boolean())
    check_in_child: bool | None = attrs.field(default=None, validator=checks.boolean())
    progress: Callable[[float], object] | None = attrs.field(default=None, validator=_callable)
    backend_options: Mapping[str, Any] = attrs.field(factory=dict, converter=_options)


def _path(value: str | os.PathLike[str]) -> str:
    return checks.check_path("path", value)


@lists_fields("AdapterSpec")
@attrs.frozen(kw_only=True, field_transformer=checks.plain_numbers)
class AdapterSpec:
    """A LoRA adapter (a GGUF file, or a folder that PEFT wrote) and the scale to apply it with.

    The file may also be a control vector; see `Context.set_control_vector`.
    """

    path: str = attrs.field(converter=_path)
    scale: float = attrs.field(default=1.0, validator=checks.number(optional=False))


if TYPE_CHECKING:
    ControlVector: TypeAlias = (
        Mapping[int, Any] | str | os.PathLike[str] | AdapterSpec | Sequence[AdapterSpec]
    )


def _adapters(value: Sequence[AdapterSpec] | None) -> tuple[AdapterSpec, ...]:
    given = () if value is None else value
    adapters = tuple(checks.items("adapters", given, "AdapterSpec objects"))
    for adapter in adapters:
        if not isinstance(adapter, AdapterSpec):
            raise checks.refuse("adapters", adapter, "AdapterSpec objects")
    return adapters


def _window(value: int | Literal["fit"] | None) -> int | None:
    """Let "fit" pass: the core makes a number of it before a plugin sees it."""
    return cast("int | None", checks.plain_int(value))


def _is_window(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not (isinstance(value, str) and value == "fit"):
        checks.integer(0, 2**31 - 1)(instance, attribute, value)


def _no_defrag(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value is not None:
        raise InvalidInputError(
            "defrag_thold has no effect in any engine any more; leave it out",
            field=attribute.name,
            value=value,
            allowed=None,
        )


@lists_fields("ContextConfig")
@attrs.frozen(kw_only=True, field_transformer=checks.plain_numbers)
class ContextConfig:
    """The fields of llama.cpp's context parameters; None leaves the choice to the backend.

    A field that is set is honoured, or `UnsupportedFeatureError` is raised; `Context.effective`
    shows the values in force. Sizes count tokens: ``n_ctx`` is the window (None = the smaller of
    4096 and the trained window, 0 = the trained window, "fit" = the largest up to the trained one
    that memory has room for now), ``n_batch`` the maximum in one engine call, ``n_ubatch`` in one
    compute step. ``flash_attn`` is "auto", "on" or "off"; ``type_k`` and ``type_v`` name the number
    format of the KV cache: a known name, or a `KVType` that the backend declares. ``precision`` is
    that of activations, products and sums: None (or "default") is the engine's default, as its own
    users get it, "accurate" the highest that engine and processor offer for this file, "fast" one
    that is lower than the default where that is faster (`UnsupportedFeatureError` elsewhere); it
    touches neither the KV types nor flash attention. With ``on_oom="shrink"`` a failed allocation
    is tried again with a smaller n_ubatch, a smaller KV type and then half the window, down to
    ``n_ctx_min``; `Context.attempts` reports each try.

    Source of names and meaning: ``llama_context_params`` in llama.cpp's ``llama.h``.
    """

    n_ctx: int | None = attrs.field(default=None, converter=_window, validator=_is_window)
    n_batch: int | None = attrs.field(default=None, validator=checks.integer(1, 2**31 - 1))
    n_ubatch: int | None = attrs.field(default=None, validator=checks.integer(1, 2**31 - 1))
    n_seq_max: int | None = attrs.field(default=None, validator=checks.integer(1, MAX_SEQUENCES))
    n_threads: int | None = attrs.field(default=None, validator=checks.integer(1, MAX_THREADS))
    n_threads_batch: int | None = attrs.field(
        default=None, validator=checks.integer(1, MAX_THREADS)
    )
    rope_scaling_type: Literal["none", "linear", "yarn", "longrope"] | None = attrs.field(
        default=None, validator=checks.one_of(*ROPE_SCALING_TYPES)
    )
    rope_freq_base: float | None = attrs.field(default=None, validator=checks.number(0))
    rope_freq_scale: float | None = attrs.field(default=None, validator=checks.number(0))
    yarn_ext_factor: float | None = attrs.field(default=None, validator=checks.number(-1, 1))
    yarn_attn_factor: float | None = attrs.field(default=None, validator=checks.number(-1))
    yarn_beta_fast: float | None = attrs.field(default=None, validator=checks.number(-1))
    yarn_beta_slow: float | None = attrs.field(default=None, validator=checks.number(-1))
    yarn_orig_ctx: int | None = attrs.field(default=None, validator=checks.integer(0, 2**31 - 1))
    defrag_thold: None = attrs.field(default=None, validator=_no_defrag)
    pooling_type: PoolingType | None = attrs.field(
        default=None, validator=checks.one_of(*POOLING_TYPES)
    )
    attention_type: Literal["causal", "non-causal"] | None = attrs.field(
        default=None, validator=checks.one_of("causal", "non-causal")
    )
    flash_attn: Literal["auto", "on", "off"] | None = attrs.field(
        default=None, validator=checks.one_of("auto", "on", "off")
    )
    precision: Literal["default", "accurate", "fast"] | None = attrs.field(
        default=None, validator=checks.one_of(*PRECISIONS)
    )
    type_k: KnownKVType | KVType | None = attrs.field(default=None, validator=_kv_type)
    type_v: KnownKVType | KVType | None = attrs.field(default=None, validator=_kv_type)
    embeddings: bool | None = attrs.field(default=None, validator=checks.boolean())
    offload_kqv: bool | None = attrs.field(default=None, validator=checks.boolean())
    op_offload: bool | None = attrs.field(default=None, validator=checks.boolean())
    swa_full: bool | None = attrs.field(default=None, validator=checks.boolean())
    kv_unified: bool | None = attrs.field(default=None, validator=checks.boolean())
    no_perf: bool | None = attrs.field(default=None, validator=checks.boolean())
    adapters: tuple[AdapterSpec, ...] = attrs.field(default=(), converter=_adapters)
    on_oom: Literal["raise", "shrink"] = attrs.field(
        default="raise", validator=checks.one_of("raise", "shrink", optional=False)
    )
    n_ctx_min: int = attrs.field(default=256, validator=checks.integer(1, optional=False))
    backend_options: Mapping[str, Any] = attrs.field(factory=dict, converter=_options)

    def __attrs_post_init__(self) -> None:
        if self.flash_attn == "off" and self.type_v in QUANTISED_KV_TYPES:
            raise InvalidInputError(
                f"type_v={self.type_v!r} is quantised and needs flash attention; "
                "give flash_attn='auto' or 'on', or an unquantised type_v",
                field="type_v",
                value=self.type_v,
                allowed="an unquantised type, or flash_attn other than 'off'",
            )


def _logit_bias(value: Mapping[int, float] | None) -> Mapping[int, float]:
    if value is not None and not isinstance(value, Mapping):
        raise checks.refuse("logit_bias", value, "a mapping of token ids to numbers")
    bias = dict(value or {})
    for token, amount in bias.items():
        if not checks.is_integer(token) or token < 0:
            raise checks.refuse("logit_bias", token, "token ids of at least 0 as keys")
        if not (checks.is_finite(amount) and amount <= _MOST) and amount != -math.inf:
            raise checks.refuse("logit_bias", amount, f"numbers of at most {_MOST} as values")
    plain = {
        int(token): float(amount) if amount >= -_MOST else -math.inf
        for token, amount in bias.items()
    }
    return checks.frozen_mapping(plain)  # type: ignore[arg-type,return-value]


def _strings(value: str | Sequence[str] | None) -> tuple[str, ...]:
    given = (value,) if isinstance(value, str) else () if value is None else value
    strings = tuple(checks.items("stop", given, "a str or a sequence of str"))
    for string in strings:
        if not checks.check_text("stop", string):
            raise checks.refuse("stop", string, "strings that are not empty")
    return strings


def _breakers(value: Sequence[str]) -> tuple[str, ...]:
    breakers = checks.items("dry_sequence_breakers", value, "a sequence of strings")
    return tuple(checks.check_text("dry_sequence_breakers", item) for item in breakers)


_OF_THE_CORE = {
    ModelConfig: ("backend_options", "progress", "check_in_child"),
    ContextConfig: ("n_ctx", "on_oom", "n_ctx_min", "no_perf", "backend_options"),
}


def refuse_unhonoured(
    config: ModelConfig | ContextConfig,
    honoured: Iterable[str] | Mapping[str, Collection[object] | None],
    *,
    backend: str,
) -> None:
    """Raise `UnsupportedFeatureError` for a field that was set but is not honoured by a plugin.

    For plugins: ``honoured`` maps the fields that the engine honours to the values that it accepts
    (None = all). What the core does for every backend is honoured anyway: the window, ``on_oom``,
    ``n_ctx_min``, ``no_perf``, ``progress`` (0 and 1), ``check_in_child``, and the keys of
    ``backend_options``, which it has checked against the descriptor.

    >>> config = ContextConfig(n_batch=64, n_seq_max=1)
    >>> refuse_unhonoured(config, {"n_batch": None, "n_seq_max": (1,)}, backend="mine")
    """
    if type(config) not in _OF_THE_CORE:
        raise checks.refuse("config", config, "a ModelConfig or a ContextConfig")
    checks.check_text("backend", backend)
    takes = _honoured(honoured)
    known = attrs.fields_dict(type(config))
    checks.check_options("honoured", takes, known)
    for name, field in known.items():
        value = getattr(config, name)
        unset = value is None or value == field.default or (isinstance(value, tuple) and not value)
        if unset or name in _OF_THE_CORE[type(config)]:
            continue
        allowed = takes.get(name, ())
        if allowed is not None and value not in allowed:
            hint = f"it takes {', '.join(map(repr, allowed))}" if allowed else "leave it out"
            shown = name if callable(value) else f"{name}={value!r}"
            raise UnsupportedFeatureError(feature=shown, backend=backend, hint=hint)


def _honoured(given: Any) -> Mapping[str, Collection[object] | None]:
    try:
        takes = dict(given) if isinstance(given, Mapping) else dict.fromkeys(given)
    except TypeError as error:
        raise checks.refuse("honoured", given, "names of fields, or a mapping of them") from error
    for values in takes.values():
        if not isinstance(values, (Collection, type(None))):
            raise checks.refuse(
                "honoured", values, "a collection of values for each field, or None"
            )
    return takes


@lists_fields("SamplingConfig")
@attrs.frozen(kw_only=True, field_transformer=checks.plain_numbers)
class SamplingConfig:
    """How the next token is chosen; the same meaning on every backend.

    The order is fixed: constraint mask, bias, repeated n-grams, penalties, dry, top_n_sigma, top_k,
    typical, top_p, min_p, xtc, temperature, selection. ``no_repeat_ngram_size=n`` forbids tokens
    that would make n tokens in a row appear again, prompt included; 0 is off. ``temperature=0``
    takes the most likely token, whatever else is set and without randomness. ``top_k=0`` and
    ``top_n_sigma=-1`` are off, as are ``top_p=1``, ``min_p=0``, ``typical_p=1`` and
    ``xtc_probability=0``. Selection is a draw, mirostat's, or, with ``adaptive_p_target`` at least
    0, that of adaptive-p, which prefers tokens about as likely as that on average. ``seed=None``
    draws one; `Sampler.seed` reports it. ``implementation`` is "portable" (NumPy, the
    specification), "native" (the engine's own) or "auto", which is always the portable one.
    """

    temperature: float = attrs.field(default=0.8, validator=checks.number(0, optional=False))
    top_k: int = attrs.field(default=40, validator=checks.integer(0, optional=False))
    top_p: float = attrs.field(default=0.95, validator=checks.number(0, 1, optional=False))
    min_p: float = attrs.field(default=0.05, validator=checks.number(0, 1, optional=False))
    typical_p: float = attrs.field(default=1.0, validator=checks.number(0, 1, optional=False))
    top_n_sigma: float = attrs.field(default=-1.0, validator=checks.number(-1, optional=False))
    xtc_probability: float = attrs.field(default=0.0, validator=checks.number(0, 1, optional=False))
    xtc_threshold: float = attrs.field(default=0.1, validator=checks.number(0, 1, optional=False))
    dynatemp_range: float = attrs.field(default=0.0, validator=checks.number(0, optional=False))
    dynatemp_exponent: float = attrs.field(default=1.0, validator=checks.number(0, optional=False))
    mirostat: Literal[0, 1, 2] = attrs.field(
        default=0, validator=checks.one_of(0, 1, 2, optional=False)
    )
    mirostat_tau: float = attrs.field(default=5.0, validator=checks.number(0, optional=False))
    mirostat_eta: float = attrs.field(default=0.1, validator=checks.number(0, optional=False))
    adaptive_p_target: float = attrs.field(
        default=-1.0, validator=checks.number(-1, 1, optional=False)
    )
    adaptive_p_decay: float = attrs.field(
        default=0.9, validator=checks.number(0, 0.99, optional=False)
    )
    repeat_penalty: float = attrs.field(default=1.0, validator=checks.number(1e-6, optional=False))
    frequency_penalty: float = attrs.field(default=0.0, validator=checks.number(optional=False))
    presence_penalty: float = attrs.field(default=0.0, validator=checks.number(optional=False))
    penalty_last_n: int = attrs.field(default=64, validator=checks.integer(-1, optional=False))
    dry_multiplier: float = attrs.field(default=0.0, validator=checks.number(0, optional=False))
    dry_base: float = attrs.field(default=1.75, validator=checks.number(0, optional=False))
    dry_allowed_length: int = attrs.field(default=2, validator=checks.integer(0, optional=False))
    dry_penalty_last_n: int = attrs.field(default=-1, validator=checks.integer(-1, optional=False))
    dry_sequence_breakers: tuple[str, ...] = attrs.field(
        default=("\n", ":", '"', "*"), converter=_breakers
    )
    logit_bias: Mapping[int, float] = attrs.field(factory=dict, converter=_logit_bias)
    seed: int | None = attrs.field(default=None, validator=checks.integer(0, MAX_SEED))
    min_keep: int = attrs.field(default=1, validator=checks.integer(0, optional=False))
    ignore_eos: bool = attrs.field(default=False, validator=checks.boolean(optional=False))
    no_repeat_ngram_size: int = attrs.field(default=0, validator=checks.integer(0, optional=False))
    implementation: Literal["auto", "native", "portable"] = attrs.field(
        default="auto",
        validator=checks.one_of("auto", "native", "portable", optional=False),
    )

    def __attrs_post_init__(self) -> None:
        if self.mirostat and self.adaptive_p_target >= 0:
            raise checks.refuse(
                "adaptive_p_target", self.adaptive_p_target, "-1 (off) beside mirostat: one selects"
            )


def _stop_tokens(value: Sequence[int] | None) -> tuple[int, ...]:
    given = () if value is None else value
    tokens = checks.items("stop_tokens", given, "a sequence of token ids")
    for token in tokens:
        if not checks.is_integer(token) or token < 0:
            raise checks.refuse("stop_tokens", token, "token ids of at least 0")
    return tuple(int(token) for token in tokens)


def _processors(value: Sequence[Any] | None) -> tuple[Any, ...]:
    given = () if value is None else value
    processors = tuple(checks.items("processors", given, "a sequence of processors"))
    for processor in processors:
        if not callable(getattr(processor, "apply", processor)):
            raise checks.refuse(
                "processors",
                processor,
                "objects with apply(logits), or callables f(input_ids, logits); both return logits",
            )
    return processors


@lists_fields("SpeculativeConfig")
@attrs.frozen(kw_only=True, field_transformer=checks.plain_numbers)
class SpeculativeConfig:
    """How tokens are guessed ahead and verified in one call; the result stays the same.

    ``kind="prompt_lookup"`` guesses what followed the last ``n_gram`` tokens (or fewer) before;
    "draft_model" asks ``draft_model``, a loaded `Model` with the same vocabulary. ``n_draft`` is
    the maximum number of tokens guessed at once. If a draft model fails, only the guessing ends,
    with a warning in the log.
    """

    kind: Literal["prompt_lookup", "draft_model"] = attrs.field(
        default="prompt_lookup",
        validator=checks.one_of("prompt_lookup", "draft_model", optional=False),
    )
    n_draft: int = attrs.field(default=8, validator=checks.integer(1, 256, optional=False))
    n_gram: int = attrs.field(default=3, validator=checks.integer(1, 16, optional=False))
    draft_model: Any = None

    def __attrs_post_init__(self) -> None:
        if (self.kind == "draft_model") != (self.draft_model is not None):
            raise checks.refuse(
                "draft_model", self.draft_model, "a loaded model with kind='draft_model' only"
            )


def _speculative(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    named = isinstance(value, str) and value == "auto"
    if value is not None and not named and not isinstance(value, SpeculativeConfig):
        raise checks.refuse(attribute.name, value, "a SpeculativeConfig, 'auto' or None")


@lists_fields("DecodeConfig")
@attrs.frozen(kw_only=True, field_transformer=checks.plain_numbers)
class DecodeConfig:
    """How one decode runs.

    ``max_tokens`` bounds the generated tokens (None = until the window is full); ``stop`` holds
    strings that end the text and never appear in it, unless ``include_stop`` leaves the one that
    ended it at its end; ``stop_tokens`` are ids that end it as an end-of-generation token does.
    None of these ends the text within its first ``min_tokens`` tokens, except a finished
    ``response_format``. ``prompt_logprobs=n`` evaluates the prompt anew to report how likely each
    of its tokens was, besides the n most likely ones (`StreamChunk.prompt_logprobs`). ``sampling``
    chooses tokens: a `SamplingConfig`, or "model" for what the model's files recommend
    (`ModelInfo.sampling`) over the defaults. ``logprobs=n`` reports the n most likely tokens of
    each step besides the chosen one. ``processors`` are objects with ``apply(logits) -> logits``
    (float32 [n_vocab]). ``response_format`` constrains the text to a JSON schema, regex, grammar or
    choice. ``special_text`` shows control tokens as text. ``speculative`` guesses tokens ahead:
    "auto" looks them up in the text so far where that pays, and never when a seed is given.
    ``timeout`` is in seconds from the call, including waiting: the decode then ends with finish
    reason "timeout", or before its first token with `CallTimeoutError`.
    """

    max_tokens: int | None = attrs.field(default=None, validator=checks.integer(1))
    min_tokens: int = attrs.field(default=0, validator=checks.integer(0, optional=False))
    stop: tuple[str, ...] = attrs.field(default=(), converter=_strings)
    stop_tokens: tuple[int, ...] = attrs.field(default=(), converter=_stop_tokens)
    include_stop: bool = attrs.field(default=False, validator=checks.boolean(optional=False))
    sampling: SamplingConfig | Literal["model"] = attrs.field(factory=SamplingConfig)
    logprobs: int | None = attrs.field(default=None, validator=checks.integer(0, 1000))
    prompt_logprobs: int | None = attrs.field(default=None, validator=checks.integer(0, 1000))
    processors: tuple[Any, ...] = attrs.field(default=(), converter=_processors)
    response_format: Any = attrs.field(default=None)
    special_text: bool = attrs.field(default=False, validator=checks.boolean(optional=False))
    speculative: SpeculativeConfig | Literal["auto"] | None = attrs.field(
        default=None, validator=_speculative
    )
    timeout: float | None = attrs.field(default=None, validator=checks.seconds())

    def __attrs_post_init__(self) -> None:
        named = isinstance(self.sampling, str) and self.sampling == "model"
        if not named and not isinstance(self.sampling, SamplingConfig):
            raise checks.refuse("sampling", self.sampling, "a SamplingConfig, or 'model'")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise checks.refuse("min_tokens", self.min_tokens, f"at most {self.max_tokens}")


def sampling_of(
    config: DecodeConfig, recommended: Mapping[str, Any] | None = None
) -> SamplingConfig:
    """Return the sampling of ``config``; "model" is ``recommended``, laid over the defaults."""
    if isinstance(config.sampling, SamplingConfig):
        return config.sampling
    return SamplingConfig(**(recommended or {}))
