"""Refuses the models over which llama.cpp ends the process, from the header of their file.

What it merely refuses is left to it: it says why. Each rule here is an assertion, or an exception
that nobody catches, in the engine's loader or tokenizer.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from infercore.weight_files import gguf as headers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from infercore.weight_files.gguf import Header

MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
_N_BYTES = 256
_N_POOLINGS = 5
_BYTE_KIND = 6
_BYTE_TEXT = re.compile(rb"<0x[0-9A-Fa-f]{2}>")
# Numbers of enum ggml_type; the engine refuses those that stand for nothing.
_F32, _I32 = 0, 26
_NO_WEIGHTS = frozenset({9, 15, *range(24, 29)})  # intermediate results, integers, doubles
_TABLES = ("ffn_gate_tid2eid.weight",)
_WKV_STEP = 64
_ADAPTER_KEYS = {
    "general.type": str,
    "general.architecture": str,
    "adapter.type": str,
    "adapter.lora.alpha": float,
}


def complaint(path: str) -> str | None:
    """Return what is wrong with the model at ``path``, None where nothing is known to be."""
    try:
        header = headers.read(path)
    except headers.MalformedError:
        return None  # the engine notices and says where
    except headers.ImplausibleError as error:
        return str(error)
    return next((found for rule in _RULES for found in rule(header)), None)


def adapter_complaint(path: str) -> str | None:
    """Return what is wrong with the LoRA adapter at ``path``, None where nothing is known to be."""
    try:
        header = headers.read(path)
    except (headers.MalformedError, headers.ImplausibleError) as error:
        return str(error)
    return next(_of_adapter(header), None)


def _of_adapter(header: Header) -> Iterator[str]:
    """The engine asserts that these entries are of the type it reads."""
    for key, kind in _ADAPTER_KEYS.items():
        value = header.metadata.get(key)
        if value is not None and not isinstance(value, kind):
            yield f"its {key} is {value!r}"
    for tensor in header.tensors.values():
        if tensor.kind in _NO_WEIGHTS and tensor.name.endswith((".lora_a", ".lora_b")):
            yield f"its tensor {tensor.name!r} is of type {tensor.kind}"


def _not_a_model(header: Header) -> Iterator[str]:
    """Files of the same format that hold something else."""
    if header.metadata.get("general.type") == "adapter":
        yield "it is an adapter; load the model that it belongs to, and give it as adapters"
    elif not header.tensors and not header.metadata.get("split.count"):
        vocabulary = "tokenizer.ggml.tokens" in header.metadata
        yield "it holds a vocabulary and no weights" if vocabulary else "it holds no weights"


def _layers(header: Header) -> Iterator[str]:
    value = header.own("block_count")
    if value is not None and not (_is_count(value) and 1 <= value <= MAX_LAYERS):
        key = f"{header.architecture}.block_count"
        yield f"its {key} is {value!r}; a model has 1 to {MAX_LAYERS} layers"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tokens(header: Header) -> Iterator[str]:
    """Two tokens of one text fail an assertion."""
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, tuple) and len(set(tokens)) < len(tokens):
        token, n = Counter(tokens).most_common(1)[0]
        yield f"its vocabulary has the token {token!r} {n} times"


def _byte_tokens(header: Header) -> Iterator[str]:
    """A text with a byte that SentencePiece has no token for is an exception nobody catches."""
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if header.metadata.get("tokenizer.ggml.model") != "llama" or not isinstance(tokens, tuple):
        return
    known = set(tokens)
    for value in range(_N_BYTES):
        if f"<0x{value:02X}>".encode() not in known and bytes([value]) not in known:
            yield f"its vocabulary has no token for the byte 0x{value:02X}"
            return


def _byte_kinds(header: Header) -> Iterator[str]:
    """The byte of a token that is marked as one is read from its text, in which it must stand."""
    tokens, kinds = (
        header.metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type")
    )
    if not isinstance(tokens, tuple) or not isinstance(kinds, tuple) or _BYTE_KIND not in kinds:
        return
    knows_bytes = header.metadata.get("tokenizer.ggml.model") != "bert"
    for number, (token, kind) in enumerate(zip(tokens, kinds, strict=False)):
        if kind == _BYTE_KIND and not (knows_bytes and _BYTE_TEXT.fullmatch(token)):
            yield f"its token {number}, {token!r}, is marked as a byte and is none"
            return


def _tensor_kinds(header: Header) -> Iterator[str]:
    """The engine's kernels take what a file offers for granted: another type is an assertion."""
    for tensor in header.tensors.values():
        if tensor.kind == _I32 and tensor.name.endswith(_TABLES):
            continue
        # tools that write files leave out the one row of some matrices
        is_matrix = len(tensor.dims) > 1 or tensor.name.startswith("cls") or "shexp" in tensor.name
        if tensor.kind in _NO_WEIGHTS or not (is_matrix or tensor.kind == _F32):
            what = "a matrix" if is_matrix else "a vector"
            yield f"its tensor {tensor.name!r}, {what}, is of type {tensor.kind}"
            return


def _head_sizes(header: Header) -> Iterator[str]:
    """The kernel of RWKV works in steps of 64, and reads and writes beyond smaller heads."""
    size = header.own("wkv.head_size")
    if _is_count(size) and (size <= 0 or size % _WKV_STEP):
        yield f"its wkv.head_size is {size}; the engine needs a multiple of {_WKV_STEP}"


def _epsilons(header: Header) -> Iterator[str]:
    for key, value in header.metadata.items():
        if key.endswith("_epsilon") and isinstance(value, float) and not 0 <= value < math.inf:
            yield f"its {key} is {value!r}; it must be at least 0"


def _rope(header: Header) -> Iterator[str]:
    value = header.own("rope.scaling.type")
    if value is not None and value not in _ROPE_SCALINGS:
        yield f"its rope.scaling.type is {value!r}; there are {', '.join(_ROPE_SCALINGS)}"


def _pooling(header: Header) -> Iterator[str]:
    value = header.own("pooling_type")
    if value is not None and not (_is_count(value) and 0 <= value < _N_POOLINGS):
        yield f"its pooling_type is {value!r}; there are 0 to {_N_POOLINGS - 1}"


def _experts(header: Header) -> Iterator[str]:
    n, used = (_most(header.own(key)) for key in ("expert_count", "expert_used_count"))
    if (n or used) and not 1 <= used <= n:
        yield f"it uses {used} of {n} experts"


def _most(value: Any) -> int:
    """Return a count that may be given for each layer."""
    values = value if isinstance(value, tuple) else (value,)
    most: int = max((v for v in values if _is_count(v)), default=0)
    return most


_RULES: tuple[Callable[[Header], Iterator[str]], ...] = (
    _not_a_model,
    _layers,
    _tokens,
    _byte_tokens,
    _byte_kinds,
    _tensor_kinds,
    _head_sizes,
    _epsilons,
    _rope,
    _pooling,
    _experts,
)
