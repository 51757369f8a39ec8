"""What is known of a loaded model: read once, and asked by everything that checks a config."""

from __future__ import annotations

import ctypes
import re
import struct
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from infercore import ModelInfo, OutOfMemoryError
from infercore_llamacpp import log
from infercore_llamacpp.library import api, text_of

if TYPE_CHECKING:
    from collections.abc import Mapping

_NONE: Mapping[str, object] = MappingProxyType({})
KV_TYPES = {
    "f32": api.GGML_TYPE_F32,
    "f16": api.GGML_TYPE_F16,
    "bf16": 30,  # in ggml.h, but not among the declarations of llama-cpp-python
    "q8_0": api.GGML_TYPE_Q8_0,
    "q5_1": api.GGML_TYPE_Q5_1,
    "q5_0": api.GGML_TYPE_Q5_0,
    "q4_1": api.GGML_TYPE_Q4_1,
    "q4_0": api.GGML_TYPE_Q4_0,
    "iq4_nl": api.GGML_TYPE_IQ4_NL,
}
PLAIN_KV_TYPES = ("f32", "f16", "bf16")
SHIFTED_KV_TYPES = ("f32", "f16")  # the engine dies when it turns keys of another type
HEAD_BYTES = 8  # of a saved sequence: a mark, and the number it had
KV_BLOCK = 32  # elements of a block of every quantised type above
POOLING = ("none", "mean", "cls", "last", "rank")  # by their number in llama.h
ROPE_SCALING = ("none", "linear", "yarn", "longrope")  # likewise
_NO_LAYERS = re.compile(r"llama_kv_cache: size = .*, +0 layers,")
_GUESSED = 1024  # LLAMA_FTYPE_GUESSED: the file does not say; its tensors do
_ACTIVATIONS = {
    api.LLAMA_FTYPE_ALL_F32: "f32",
    api.LLAMA_FTYPE_MOSTLY_F16: "f16",
    api.LLAMA_FTYPE_MOSTLY_BF16: "bf16",
}
# The engine moves keys by turning all of them. Here that makes others than a decode at the new
# place: positions are learned (added before the first layer), or a bias of attention, or some
# layers turn no keys, or turn theirs by a rule of their own.
_UNTURNED = frozenset({
    "afmoe", "baichuan", "cohere2", "cohere2moe", "dots3note", "exaone-moe", "exaone4", "gpt2",
    "llama4", "maple", "mpt", "muse-glimmer", "smallthinker", "smollm3", "starcoder",
})  # fmt: skip
_UNTURNED_IF_SLIDING = frozenset({"mellum", "olmo2"})
_FIXED_POSITION_ROPES = (
    api.LLAMA_ROPE_TYPE_MROPE,
    api.LLAMA_ROPE_TYPE_IMROPE,
    api.LLAMA_ROPE_TYPE_VISION,
)


@dataclass(frozen=True)
class Traits:
    """The shape of a model, what its file says, and what a first small context showed."""

    info: ModelInfo
    head_k: int
    head_v: int
    n_embd_inp: int
    n_embd_out: int
    n_cls_out: int
    rope_type: int
    ftype: int
    has_memory: bool
    can_shift: bool
    is_causal: bool
    has_gpu: bool
    n_caches: int  # of keys and values, that begin the saved state of a sequence

    def own(self, key: str) -> str | None:
        """Return the metadata value of ``key`` under the model's architecture."""
        return self.info.metadata.get(f"{self.info.architecture}.{key}")

    def own_number(self, key: str, default: float) -> float:
        """Return `own` as a number, ``default`` where it is absent or none."""
        try:
            return float(self.own(key) or "")
        except ValueError:
            return default

    @property
    def activations(self) -> str:
        """What activations are rounded to before they are multiplied with the weights."""
        return _ACTIVATIONS.get(self.ftype, "q8")

    @property
    def is_recurrent(self) -> bool:
        """Whether any layer keeps a state that cannot be cut."""
        return self.info.is_recurrent or self.info.is_hybrid

    @property
    def has_attention(self) -> bool:
        """Whether any layer attends to earlier tokens."""
        return not self.info.is_recurrent or self.info.is_hybrid

    @property
    def has_kv(self) -> bool:
        """Whether keys and values are kept; if not, there is nothing to choose a type for."""
        return self.has_memory and self.has_attention

    @property
    def keeps_whole_window(self) -> bool:
        """Whether every layer keeps keys and values for all tokens of the window."""
        return self.has_kv and not self.is_recurrent and self.info.sliding_window is None

    @property
    def moves_positions(self) -> bool:
        """Whether positions of resident tokens can be changed."""
        plain = self.rope_type not in _FIXED_POSITION_ROPES
        turns = self.info.architecture not in _UNTURNED and not (
            self.info.architecture in _UNTURNED_IF_SLIDING and self.info.sliding_window
        )
        return self.has_memory and self.can_shift and not self.is_recurrent and plain and turns

    @property
    def has_cell_extras(self) -> bool:
        """Whether saved state has of each cell more than its position: a place in an image."""
        return self.rope_type in _FIXED_POSITION_ROPES

    @property
    def n_pos(self) -> int:
        """How many numbers say where a row is that is given in place of a token."""
        return 4 if self.rope_type in _FIXED_POSITION_ROPES[:2] else 1

    @property
    def has_learned_positions(self) -> bool:
        """Whether positions beyond the trained window are outside a table."""
        if not self.has_memory:
            return True
        return self.rope_type == api.LLAMA_ROPE_TYPE_NONE and not self.is_recurrent

    @property
    def pooling(self) -> str:
        """The pooling that the model was trained for, "none" where its file names none."""
        number = int(self.own_number("pooling_type", 0))
        return POOLING[number] if 0 <= number < len(POOLING) else "none"

    @property
    def poolings(self) -> tuple[str, ...]:
        """The poolings that make sense: ranking needs a head that was trained for it."""
        return POOLING if self.pooling == "rank" else POOLING[:-1]

    @property
    def kv_types(self) -> tuple[str, ...]:
        """The number formats that fit the model's head sizes."""
        if not self.has_kv:
            return ("f32",)
        fits = self.head_k % KV_BLOCK == 0 and self.head_v % KV_BLOCK == 0
        return tuple(KV_TYPES) if fits else PLAIN_KV_TYPES

    @property
    def shares_kv_types(self) -> bool:
        """Whether K and V are one compressed tensor (MLA) and so of one type."""
        return self.own("attention.key_length_mla") is not None


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_metadata(model: int) -> dict[str, str]:
    """Return what the model's file says of itself, as text."""
    metadata = {}
    for i in range(api.llama_model_meta_count(model)):
        key = text_of(api.llama_model_meta_key_by_index, model, i)
        value = text_of(api.llama_model_meta_val_str_by_index, model, i)
        metadata[key] = value
    return metadata


def read_info(
    model: int, *, has_memory: bool, overrides: Mapping[str, object] = _NONE
) -> ModelInfo:
    """Return the shape of a loaded model."""
    metadata = {**read_metadata(model), **{key: _text(value) for key, value in overrides.items()}}
    return ModelInfo(
        architecture=metadata.get("general.architecture", ""),
        n_vocab=api.llama_vocab_n_tokens(api.llama_model_get_vocab(model)),
        n_ctx_train=api.llama_model_n_ctx_train(model),
        n_embd=api.llama_model_n_embd(model),
        n_layer=api.llama_model_n_layer(model),
        n_head=api.llama_model_n_head(model),
        n_head_kv=api.llama_model_n_head_kv(model),
        n_params=api.llama_model_n_params(model),
        size_bytes=api.llama_model_size(model),
        is_recurrent=api.llama_model_is_recurrent(model),
        is_hybrid=api.llama_model_is_hybrid(model),
        sliding_window=api.llama_model_n_swa(model) or None,
        has_encoder=api.llama_model_has_encoder(model) or not has_memory,
        description=text_of(api.llama_model_desc, model),
        metadata=metadata,
    )


def read_traits(model: int, *, has_gpu: bool, overrides: Mapping[str, object] = _NONE) -> Traits:
    """Return all that is known of a loaded model; makes a small context for a moment.

    ``overrides`` took the place of what its file says, which the engine goes on telling.
    """
    has_memory, can_shift, is_causal, n_caches = _probe(model)
    info = read_info(model, has_memory=has_memory, overrides=overrides)
    head = info.n_embd // info.n_head if info.n_head else 0

    def length(key: str) -> int:
        value = info.metadata.get(f"{info.architecture}.attention.{key}", "")
        return int(value) if value.isdigit() else head

    # An encoder alone gets a cache from the engine, in which nothing that it decodes makes sense.
    has_memory = has_memory and api.llama_model_has_decoder(model)
    return Traits(
        info=info,
        head_k=length("key_length"),
        head_v=length("value_length"),
        n_embd_inp=api.llama_model_n_embd_inp(model),
        n_embd_out=api.llama_model_n_embd_out(model),
        n_cls_out=api.llama_model_n_cls_out(model),
        rope_type=api.llama_model_rope_type(model),
        ftype=api.llama_model_ftype(model) & ~_GUESSED,
        has_memory=has_memory,
        can_shift=can_shift,
        is_causal=is_causal,
        has_gpu=has_gpu,
        n_caches=n_caches,
    )


def _probe(model: int) -> tuple[bool, bool, bool, int]:
    """Ask a context of the smallest size for what only a context knows."""
    params = api.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 1
    with log.listening() as lines:
        context = api.llama_init_from_model(model, params)
        if not context:
            what = "llama.cpp could not allocate a context of one token"
            raise log.explain(OutOfMemoryError(what))
    try:
        memory = api.llama_get_memory(context)
        # To move what a cache of no layers holds is an assertion: of windows in all layers, or none
        can_shift = api.llama_memory_can_shift(memory) and not any(map(_NO_LAYERS.match, lines))
        return bool(memory), can_shift, api.llama_get_causal_attn(context), _n_caches(context)
    finally:
        api.llama_free(context)


def _n_caches(context: int) -> int:
    """Return how many caches begin what an empty context of one stream saves of a sequence.

    0 where others stand behind a recurrent state, whose end only the engine knows.
    """
    buffer = (ctypes.c_uint8 * api.llama_state_seq_get_size(context, 0))()
    api.llama_state_seq_get_data(context, buffer, len(buffer), 0)
    data, empty_cache = bytes(buffer)[HEAD_BYTES:], struct.pack("<II", 1, 0)
    n = 0
    while data[8 * n : 8 * n + 8] == empty_cache:
        n += 1
    return 0 if len(data) > 8 * n and data.endswith(empty_cache) else n
