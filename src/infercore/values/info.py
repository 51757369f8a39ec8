"""What a backend, a model and a context say of themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping  # noqa: TC003  (attrs resolves annotations)
from typing import Any, Literal

import attrs

from infercore.values import checks
from infercore.values.config import SamplingConfig
from infercore.values.shown import count, fields_table, one_line, size, table

DEVICE_KINDS = ("cpu", "gpu", "igpu", "npu", "accel")


@attrs.frozen(kw_only=True)
class DeviceInfo:
    """A compute device of this machine: its name, kind, memory, and what it is in a few words.

    ``kind`` is "cpu", "gpu", "igpu", "npu" or "accel" (anything else that computes). An engine on
    another machine has none here. ``memory_total_bytes`` and ``memory_free_bytes`` are None where
    the engine does not report them.
    """

    name: str
    kind: str
    description: str = ""
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None


@attrs.frozen(kw_only=True)
class BackendInfo:
    """A backend that was found: usable, or with the ``reason`` why not.

    ``version`` is the engine's, ``plugin_version`` that of ``distribution``. ``formats`` are
    short names of what it reads ("gguf", "openvino", ...). ``devices`` is empty until asked for
    with ``backends(devices=True)``, as listing them imports the engine.
    """

    name: str
    available: bool
    reason: str | None = None
    summary: str = ""
    formats: tuple[str, ...] = ()
    distribution: str | None = None
    plugin_version: str | None = None
    version: str | None = None
    api_version: int | None = None
    priority: int = 0
    devices: tuple[DeviceInfo, ...] = ()

    def __repr__(self) -> str:
        return one_line(self)


def _true(_: object) -> bool:
    return True


def _no_media(_: Any, attribute: attrs.Attribute[Any], value: object) -> None:
    if value != ():
        raise checks.refuse(attribute.name, value, "() until sessions take parts other than text")


@attrs.frozen(kw_only=True)
class Capabilities:
    """What the loaded model can do in this context; probed, never assumed.

    What is declared works; what is not raises `UnsupportedFeatureError` and changes nothing.

    ``kv_remove`` is "any" (any part of a sequence), "suffix" (its end), "rollback" (its last
    ``max_rollback`` tokens) or "none" (only whole sequences). ``kv_copy`` is "any", "full" (whole
    sequences) or "none". ``pooling``, ``kv_types`` and ``flash_attention`` list the accepted
    values. ``abort`` means that a running call can be cancelled from another thread. ``perf`` is
    always True: the core counts, for every backend. ``media`` lists the kinds of content parts,
    besides text, that a chat may hold; sessions accept none yet, so no backend may declare any.
    ``logits`` is "full" (those of every token can be read), "top" (only the ``n_top`` likeliest
    tokens have them: rows hold their log-probabilities and -inf for all others; anything that
    cannot be computed exactly from these is refused) or "none" (the engine generates by itself and
    exposes none: its sessions take tokens from it, and anything that needs logits is refused).
    ``scans_cells`` means that a call of sequences that share their cells (``kv_unified=True``)
    reads those of all, so that it takes longer the more the others hold.
    """

    kv_remove: Literal["any", "suffix", "rollback", "none"] = attrs.field(
        default="none", validator=checks.one_of("any", "suffix", "rollback", "none")
    )
    max_rollback: int = 0
    kv_copy: Literal["any", "full", "none"] = attrs.field(
        default="none", validator=checks.one_of("any", "full", "none")
    )
    kv_shift: bool = False
    kv_divide: bool = False
    multi_sequence: bool = False
    scans_cells: bool = False
    state: bool = False
    sequence_state: bool = False
    logits_all: bool = False
    embeddings: bool = False
    pooling: tuple[str, ...] = ()
    encoder: bool = False
    abort: bool = False
    live_threads: bool = False
    kv_types: tuple[str, ...] = ()
    flash_attention: tuple[str, ...] = ()
    gpu_offload: bool = False
    lora: bool = False
    native_sampler: bool = False
    logits: str = attrs.field(default="full", validator=checks.one_of("full", "top", "none"))
    n_top: int = attrs.field(default=0, validator=checks.integer(0, optional=False))
    perf: bool = attrs.field(default=True, converter=_true)
    media: tuple[str, ...] = attrs.field(default=(), validator=_no_media)

    def __repr__(self) -> str:
        return one_line(self)

    def _repr_html_(self) -> str:
        return fields_table(self)


def _sampling(_: Any, __: attrs.Attribute[Any], value: Mapping[str, Any]) -> None:
    checks.build(SamplingConfig, None, value)


@attrs.frozen(kw_only=True)
class ModelInfo:
    """The shape of a loaded model; ``metadata`` holds what else its files state, as text.

    ``n_params`` counts weights, ``size_bytes`` their bytes in the files, ``n_ctx_train`` the
    trained window in tokens. For these, and for ``n_embd``, ``n_layer``, ``n_head`` and
    ``n_head_kv``, 0 means that the engine does not know. ``sliding_window`` is the width in tokens
    of the sliding-window layers, None where there are none. ``sampling`` are the fields of
    `SamplingConfig` that the files recommend, with their values; a plugin may leave it to the core,
    which reads it from ``metadata`` (``general.sampling.*``, ``generation_config.*``).
    """

    architecture: str
    n_vocab: int
    n_ctx_train: int
    n_embd: int
    n_layer: int
    n_head: int
    n_head_kv: int
    n_params: int
    size_bytes: int
    is_recurrent: bool = False
    is_hybrid: bool = False
    sliding_window: int | None = None
    has_encoder: bool = False
    description: str = ""
    metadata: Mapping[str, str] = attrs.field(factory=dict, converter=checks.frozen_mapping)
    sampling: Mapping[str, Any] = attrs.field(
        factory=dict, converter=checks.frozen_mapping, validator=_sampling
    )

    def __repr__(self) -> str:
        return one_line(self)

    def _repr_html_(self) -> str:
        rows = [
            ("architecture", self.architecture),
            ("weights", f"{count(self.n_params)}, {size(self.size_bytes)}"),
            ("trained window", f"{self.n_ctx_train:,} tokens"),
            ("vocabulary", f"{self.n_vocab:,} tokens"),
            ("layers", self.n_layer),
            ("heads", f"{self.n_head} ({self.n_head_kv} of keys and values)"),
            ("embedding", self.n_embd),
            *sorted(self.sampling.items()),
        ]
        return table(self.description or self.architecture, rows)


@attrs.frozen(kw_only=True)
class MemoryPlan:
    """Bytes that a model and a context will take, from metadata alone.

    ``kv_bytes_by_kind`` splits the cache by layer kind: "full", "sliding", "recurrent".
    ``compute_bytes`` is what an engine holds besides weights and cache: the arrays of a step and,
    where it keeps one, its own layout of the weights. The window is assumed to be full.
    ``peak_bytes`` is the most that is held at once, including while loading.
    """

    weights_bytes: int
    kv_bytes: int
    compute_bytes: int
    peak_bytes: int
    n_ctx: int
    kv_bytes_by_kind: Mapping[str, int] = attrs.field(factory=dict, converter=checks.frozen_mapping)

    @property
    def total_bytes(self) -> int:
        """Bytes held once everything is loaded."""
        return self.weights_bytes + self.kv_bytes + self.compute_bytes

    def __repr__(self) -> str:
        return one_line(self)

    def _repr_html_(self) -> str:
        parts = {
            "weights": self.weights_bytes,
            "KV cache": self.kv_bytes,
            "compute": self.compute_bytes,
        }
        rows = [
            *((name, size(n_bytes)) for name, n_bytes in parts.items()),
            ("total", size(self.total_bytes)),
            ("peak, loading included", size(self.peak_bytes)),
        ]
        return table(f"Memory for a window of {self.n_ctx:,} tokens", rows, parts)


@attrs.frozen(kw_only=True)
class FimTokens:
    """The ids of the marks for a gap that the model was trained to fill."""

    prefix: int
    suffix: int
    middle: int


@attrs.frozen(kw_only=True)
class PerfCounters:
    """Times in milliseconds and token counts of a context since it was opened or reset.

    ``decode`` counts calls with one token, ``prefill`` all others. ``reused_tokens`` were requested
    by a session and not evaluated because they were resident. Sessions also add the times for
    tokenizing texts, for choosing tokens (``sample_ms``), and for building a ``response_format``
    and its masks (``grammar_ms``); a decode adds its times when it ends. See `Context.reset_perf`.
    """

    load_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    tokenize_ms: float = 0.0
    sample_ms: float = 0.0
    grammar_ms: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    reused_tokens: int = 0


def _names(value: Iterable[str]) -> tuple[str, ...]:
    names = checks.items("names", value, "a sequence of names")
    return tuple(checks.check_text("names", name) for name in names)


@attrs.frozen(kw_only=True)
class BackendDescriptor:
    """What a plugin's ``infercore_backend`` hook returns.

    ``match(path)`` gives a score: 0 = cannot read it, higher = better suited; it must be cheap and
    import no engine. ``loader(path, config)`` imports the engine and returns its model. Optional:
    ``check()`` raises `BackendUnavailableError` where the engine cannot run here,
    ``engine_version()`` and ``devices()`` describe the engine, ``plan_memory(path, model_config,
    context_config)`` answers before loading (``n_ctx`` is None there for the smaller of 4096 and
    the trained window, 0 for the trained one), ``files(path)`` names the files of the model at a
    path (default: the file, or those of the folder), ``check_file(path)`` raises an error for
    whatever a cheap check finds wrong with them. ``model_options`` and ``context_options`` name the
    keys of ``backend_options`` that are understood. ``neutral_options`` are those of
    ``model_options`` that change no value in a KV cache; all others that are set belong to the
    identity of the model's saved state. ``tries_in_child=False`` says that reading a file cannot
    end the process, as with a reader written in Python: then new files are not tried in a child
    process first (`ModelConfig.check_in_child`). ``trial_options`` are ``backend_options`` that let
    the child open its context sooner. ``compiles_late=True`` says that most of a load's work is
    done when the first context opens: large files are then tried in two parts, each right before
    what it tries. ``preload`` names modules that take long to import, start no thread and touch no
    device: a process that starts isolated engines imports them once, before it forks.
    ``prepare(in_child)`` imports everything that loading needs and returns ``loader``, or, for that
    child, one that does only what a trial needs: ``check_file`` has passed, and only this backend
    uses the engine there.
    """

    name: str = attrs.field(validator=checks.text())
    api_version: int = attrs.field(validator=checks.integer(1, optional=False))
    loader: Any
    match: Any
    summary: str = ""
    formats: tuple[str, ...] = attrs.field(default=(), converter=_names)
    priority: int = 0
    check: Any = None
    engine_version: Any = None
    devices: Any = None
    plan_memory: Any = None
    files: Any = None
    check_file: Any = None
    prepare: Any = None
    tries_in_child: bool = attrs.field(default=True, validator=checks.boolean(optional=False))
    trial_options: Mapping[str, Any] = attrs.field(factory=dict, converter=checks.frozen_mapping)
    compiles_late: bool = attrs.field(default=False, validator=checks.boolean(optional=False))
    preload: tuple[str, ...] = attrs.field(default=(), converter=_names)
    model_options: tuple[str, ...] = attrs.field(default=(), converter=_names)
    context_options: tuple[str, ...] = attrs.field(default=(), converter=_names)
    neutral_options: tuple[str, ...] = attrs.field(default=(), converter=_names)
