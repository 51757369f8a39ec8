"""The rigs that the conformance suite tries this backend with, on models of the pack.

The storyteller shows all that the engine can do; ``recurrent`` cannot take tokens back, and the
narrow cache of ``sliding`` only as far as its window: they show that such models stay right.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

import infercore
from infercore.conformance import Observation, Rig, gguf_copy
from infercore.testing import engine_of, load_reference_model
from infercore.weight_files.gguf import Tensor
from infercore_llamacpp.release import DISTRIBUTION

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BACKEND = "llamacpp"
MODEL, FORMAT = "storyteller", "gguf-f32"
TOLERANCE = 5e-3
"""Float32 weights and cache, without flash attention."""

_ONE_THREAD = {
    "n_threads": 1,  # the engine's threads wait in a loop: more are slower on a busy machine
    "n_threads_batch": 1,
}
# What a rig must bring and declare: lost, it fails the run and is not refused in silence.
_REQUIRED = (
    "observe", "kv_copy", "multi_sequence", "state", "sequence_state", "logits_all", "embeddings",
    "live_threads", "lora", "native_sampler", "chat_template", "plan_memory",
)  # fmt: skip
# The same of options and calls: what is refused though it was honoured.
_ALWAYS = (
    "n_batch", "n_ubatch", "n_seq_max", "kv_unified", "n_threads", "attention_type", "precision",
    "pooling_type", "swa_full", "decode_vectors", "set_control_vector",
    "set_causal_attention", "warmup",
    *(
        f"native.{name}"
        for name in (
            "seed", "temperature", "dynatemp_range", "top_k", "top_p", "min_p", "typical_p",
            "top_n_sigma", "xtc_probability", "repeat_penalty", "frequency_penalty",
            "presence_penalty", "dry_multiplier", "mirostat", "logit_bias", "ignore_eos",
        )
    ),
)  # fmt: skip
_WITH_ATTENTION = (
    "rope_freq_base", "rope_freq_scale", "yarn", "flash_attn", "type_k", "type_v", "f16", "q8_0",
    "abort",
)  # fmt: skip
_REMOVES = ("kv_remove", "kv_shift", "kv_divide")
_EXACT = {
    "precision": "accurate",
    "flash_attn": "off",
    "type_k": "f32",
    "type_v": "f32",
    **_ONE_THREAD,
}


_OWN_OPTIONS: tuple[tuple[dict[str, Any], Callable[[Any], bool]], ...] = (
    ({"kv_overrides": {"llama.rope.freq_base": 500.0}}, lambda m: _base_of(m) == 500.0),  # noqa: PLR2004
    ({"kv_overrides": {"llama.context_length": 96}}, lambda m: m.info.n_ctx_train == 96),  # noqa: PLR2004
    ({"kv_overrides": {"tokenizer.ggml.bos_token_id": 7}}, lambda m: m.tokenizer.bos == 7),  # noqa: PLR2004
    ({"kv_overrides": {"tokenizer.ggml.add_bos_token": False}}, lambda m: not m.tokenizer.add_bos),
    (
        {"kv_overrides": {"general.name": "n" * 127, "llama.rope.freq_base": 700.0}},
        lambda m: (m.info.metadata["general.name"], _base_of(m)) == ("n" * 127, 700.0),
    ),
    (
        {"kv_overrides": {"tokenizer.ggml.add_bos_token": True}},
        lambda m: m.info.metadata["tokenizer.ggml.add_bos_token"].startswith("t"),
    ),
    (
        {"kv_overrides": {"tokenizer.ggml.add_sep_token": True}},
        lambda m: m.info.metadata["tokenizer.ggml.add_sep_token"].startswith("t"),
    ),
    *(
        ({"kv_overrides": {key: value}}, lambda m, k=key, v=value: m.info.metadata[k] == str(v))
        for key, value in (
            ("tokenizer.ggml.bos_token_id", 2**63 - 1),
            ("tokenizer.ggml.bos_token_id", -(2**63)),
            ("general.name", "n"),
        )
    ),
    ({"use_extra_bufts": False}, lambda m: _base_of(m) == 10_000.0),  # noqa: PLR2004
    (
        {"device": "cpu", "n_gpu_layers": 0, "split_mode": "none", "main_gpu": 0},
        lambda m: (m.runtime["n_gpu_layers"], m.capabilities.gpu_offload) == (0, False),
    ),
    ({"no_host": True}, lambda m: "options" not in m.runtime),
    ({}, lambda _: any(d.kind == "cpu" and _is_measured(d) for d in _devices())),
    ({"n_gpu_layers": -1}, lambda m: (m.runtime["device"] == "CPU") != m.capabilities.gpu_offload),
)
_WRONG_OVERRIDES: tuple[dict[Any, Any], ...] = (
    {"general.name": ""}, {"general.name": "n" * 128}, {"general.name": "a\0b"},
    {"general.name": None}, {"general.name": "n", "no.such.key": 1}, {"": 1}, {5: 1},
    {"no.such.key": 1}, {"tokenizer.ggml.bos_token_id": 2**63},
    {"tokenizer.ggml.bos_token_id": -(2**63) - 1},
    {"llama.block_count": 2}, {"llama.rope.freq_base": 500.0, "llama.rope.freq": 7.0},
    {"general.name": "\u00e9" * 100},
)  # fmt: skip
_WRONG_OPTIONS = (
    {"use_extra_bufts": 1},
    {"no_host": "yes"},
    *({"kv_overrides": wrong} for wrong in (5, ["a"], *_WRONG_OVERRIDES)),
)


_WIDTH, _OF_F32, _RANK = 64, 0, 4
"""Of the encoder's vectors; float32 and ranking, by their numbers in a file."""


def _devices() -> tuple[infercore.DeviceInfo, ...]:
    return next(b.devices for b in infercore.backends(devices=True) if b.name == BACKEND)


def _is_measured(device: infercore.DeviceInfo) -> bool:
    return bool(device.memory_total_bytes and device.memory_free_bytes)


def _base_of(model: Any) -> float:
    with model.new_context(n_ctx=32) as context:
        return float(context.effective["rope_freq_base"])


def rig() -> Rig:
    """Return the rig of the storyteller. Raises `ModelNotFoundError` without the model pack."""
    return _rig(
        MODEL,
        model_name=MODEL,
        adapter=pack_path("storyteller-lora"),
        adapter_name="storyteller-lora",
        narrow=pack_path(MODEL, "gguf-q8_0"),
        encoder=pack_path("encoder"),
        encoder_name="encoder",
        own_options=_OWN_OPTIONS,
        wrong_options=_WRONG_OPTIONS,
        ranker=a_ranker,
        others=(a_hybrid, a_model_of_one_layer),
        require=(
            *_REQUIRED, *_ALWAYS, *_WITH_ATTENTION, *_REMOVES, "adapters", "oracle", "adapter",
            "encoder", "kv_remove_any", "kv_copy_any",
        ),
    )  # fmt: skip


def recurrent_rig() -> Rig:
    """Return the rig of a model whose state has no parts that could be removed."""
    return _rig("recurrent", variant="recurrent")


def sliding_rig() -> Rig:
    """Return the rig of a model that forgets what its sliding window has passed."""
    return _rig(
        "sliding",
        variant="sliding",
        exact={**_EXACT, "swa_full": False},
        require=(*_REQUIRED, *_ALWAYS, *_WITH_ATTENTION, *_REMOVES),
    )


def _rig(name: str, **fields: Any) -> Rig:
    path = pack_path(name)
    given: dict[str, Any] = {
        "backend": BACKEND,
        "engine": DISTRIBUTION,
        "open_model": lambda: infercore.load_model(path, backend=BACKEND),
        "path": path,
        "open_path": lambda where: infercore.load_model(where, backend=BACKEND),
        "tolerance": TOLERANCE,
        "exact": _EXACT,
        "suite_version": "1.2",
        "observe": observe,
        "require": (*_REQUIRED, *_ALWAYS),
    }
    return Rig(**{**given, **fields})


def pack_path(name: str, form: str = FORMAT) -> str:
    """Return where a model of the pack lies. Raises `ModelNotFoundError` without the pack."""
    try:
        import infercore_models  # noqa: PLC0415  (a distribution of its own)
    except ImportError as error:
        raise infercore.ModelNotFoundError(
            "the model pack (infercore-models) is not installed; it comes from the same place "
            "as infercore",
            path=name,
        ) from error
    return str(infercore_models.path(name, form))


def a_ranker(folder: str) -> Callable[[Sequence[int], Sequence[int]], float]:
    """Write the encoder with a head into ``folder``; return the reference's vectors times the head.

    llama.cpp takes all tokens as those of a first text, and so does this.
    """
    own = gguf_copy.read(Path(pack_path("encoder")))
    head = np.random.default_rng(5).standard_normal(_WIDTH).astype(np.float32)
    added = Tensor("cls.output.weight", (_WIDTH, 1), _OF_F32, 0), head.tobytes()
    ranking = own.other(bert__pooling_type=gguf_copy.number(gguf_copy.UINT32, _RANK))
    ranking = attrs.evolve(ranking, tensors=[*ranking.tensors, added])
    (Path(folder) / "ranker.gguf").write_bytes(ranking.to_bytes())

    def score(ids: Sequence[int], _kinds: Sequence[int]) -> float:
        with (
            load_reference_model(pack_path("encoder", "hf")) as encoder,
            encoder.new_context(n_ctx=128, pooling_type="cls") as context,
        ):
            context.encode(list(ids))
            return float(context.embedding() @ head)

    return score


def a_model_of_one_layer(folder: str) -> str:
    """Write the storyteller's first layer alone."""
    own = gguf_copy.read(Path(pack_path(MODEL)))
    kept = [each for each in own.tensors if not re.match(r"blk\.[1-9]", each[0].name)]
    changed = own.other(llama__block_count=gguf_copy.number(gguf_copy.UINT32, 1))
    path = Path(folder) / "one-layer.gguf"
    path.write_bytes(attrs.evolve(changed, tensors=kept).to_bytes())
    return str(path)


def a_hybrid(folder: str) -> str:
    """Write the storyteller with short convolutions in place of attention, but for one layer.

    Beside keys and values such a model (as LFM2) keeps a state, which no part can be taken from.
    """
    own, rng = gguf_copy.read(Path(pack_path(MODEL))), np.random.default_rng(7)
    n_layer, n_embd, n_head_kv, n_taps = 4, 128, 2, 3
    kept = [
        (tensor, data)
        for tensor, data in own.tensors
        if "attn_" not in tensor.name or tensor.name.startswith("blk.1.")
        if tensor.name != "output_norm.weight"
    ]

    def add(name: str, *dims: int, data: Any = None) -> None:
        spread = 1 / np.sqrt(dims[0]) if data is None else 0
        weights = rng.standard_normal(dims[::-1]) * spread if data is None else data
        kept.append((Tensor(name, dims, _OF_F32, 0), weights.astype(np.float32).tobytes()))

    ones = np.ones(n_embd)
    for i in range(n_layer):
        if i == 1:
            add(f"blk.{i}.attn_q_norm.weight", 32, data=ones[:32])
            add(f"blk.{i}.attn_k_norm.weight", 32, data=ones[:32])
            continue
        add(f"blk.{i}.attn_norm.weight", n_embd, data=ones)
        add(f"blk.{i}.shortconv.conv.weight", n_taps, n_embd)
        add(f"blk.{i}.shortconv.in_proj.weight", n_embd, 3 * n_embd)
        add(f"blk.{i}.shortconv.out_proj.weight", n_embd, n_embd)
    add("token_embd_norm.weight", n_embd, data=ones)
    told = {key.replace("llama.", "lfm2."): value for key, value in own.entries.items()}
    told["general.architecture"] = gguf_copy.text("lfm2")
    told["lfm2.shortconv.l_cache"] = gguf_copy.number(gguf_copy.UINT32, n_taps)
    heads = [n_head_kv * (i == 1) for i in range(n_layer)]
    told["lfm2.attention.head_count_kv"] = gguf_copy.numbers("I", heads)
    path = Path(folder) / "hybrid.gguf"
    path.write_bytes(attrs.evolve(own, entries=told, tensors=kept).to_bytes())
    return str(path)


def observe(context: Any, seq_id: int) -> Observation:
    """Return what llama.cpp itself says: the positions held, the tokens it has evaluated."""
    from infercore_llamacpp.library import api  # noqa: PLC0415  (imports the engine)

    inner = engine_of(context)
    api.llama_synchronize(inner.handle)
    first = api.llama_memory_seq_pos_min(inner.memory.handle, seq_id)
    if inner.model.traits.is_recurrent:
        first = 0  # one state stands for all positions, and the engine names the last
    last = api.llama_memory_seq_pos_max(inner.memory.handle, seq_id)
    counts = api.llama_perf_context(inner.handle)
    return Observation(
        resident=last - first + 1 if last >= 0 else 0,
        evaluated=counts.n_p_eval + counts.n_eval,
        threads=(api.llama_n_threads(inner.handle), api.llama_n_threads_batch(inner.handle)),
    )
