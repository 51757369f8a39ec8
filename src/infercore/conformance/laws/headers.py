"""What a model's files say of themselves, read apart from the backend, and files that lie."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
import struct
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

import infercore
from infercore.conformance import gguf_copy
from infercore.conformance.expect import equal, foreseen, raises, that
from infercore.conformance.gguf_copy import BOOL, FLOAT32, UINT32, number
from infercore.conformance.law import law
from infercore.errors import (
    InferCoreError,
    InvalidInputError,
    ModelLoadError,
    PluginError,
    SessionFatalError,
    UnsupportedFeatureError,
)
from infercore.testing import load_reference_model
from infercore.weight_files import gguf

if TYPE_CHECKING:
    from collections.abc import Iterator

    from infercore.conformance.rig import Rig
    from infercore.values.info import ModelInfo

_OF_INFO = {
    "n_embd": "embedding_length",
    "n_layer": "block_count",
    "n_ctx_train": "context_length",
    "n_head": "attention.head_count",
    "sliding_window": "attention.sliding_window",
}
_OF_GRAPHS = ("n_head_kv", "sliding_window")
_IDS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "sep": "seperator_token_id",
    "pad": "padding_token_id",
}
_KINDS = {1: "normal", 2: "unknown", 3: "control", 4: "user_defined", 5: "unused", 6: "byte"}
_SCORED = ("llama", "t5")
_SOME = 2000
_BYTES_OF_32 = {0: 128, 1: 64, 2: 18, 8: 34, 30: 64}
"""Bytes of 32 numbers by ggml's type: f32, f16, q4_0, q8_0, bf16."""
_F16, _I32, _NO_TYPE = 1, 26, 99
MAX_COPIED = 2**28
"""Bytes of a model that is copied; a GGUF file is written anew for each lie."""
_U32, _F32, _TEXT = struct.Struct("<I"), struct.Struct("<f"), struct.Struct("<Q")


def _models(rig: Rig) -> list[tuple[Path, Any]]:
    """Return where the rig's models lie, and what the backend makes of them."""
    found: list[tuple[Path, Any]] = []
    if rig.path is not None:
        found.append((Path(rig.path), rig.model))
    if rig.encoder is not None and not rig.is_encoder:
        found.append((Path(rig.encoder), rig.encoder_model))
    return found or rig.leave("the rig names no path")


def is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as opened:
        return opened.read(len(gguf.MAGIC)) == gguf.MAGIC


@law("CAP-35", model="any", since="1.2")
def check_what_the_files_say(rig: Rig) -> None:
    """Shape, sizes, metadata, ids and template are those of the model's own files.

    So they are where a config says something else, unless it is refused.
    """
    for path, model in _models(rig):
        if is_gguf(path):
            _as_header(model, gguf.read(str(path)))
        elif (path / "config.json").is_file():
            compare_with_config(model, path)
            if bytes_of(path) <= MAX_COPIED:
                _check_other_configs(rig, path, model.info)
        else:
            rig.leave("the model is neither a GGUF file nor a folder with a config.json")


_SLIDING = {"sliding_window": 7}
_OTHER_CONFIGS: tuple[dict[str, Any], ...] = (
    {**_SLIDING, "use_sliding_window": False, "num_key_value_heads": None},
    {**_SLIDING, "layer_types": ["full_attention"], "max_position_embeddings": 5000},
    {**_SLIDING, "layer_types": ["full_attention", "sliding_attention"], "model_type": "other"},
    {**_SLIDING, "max_position_embeddings": None, "model_type": None, "num_key_value_heads": 1},
    {"num_key_value_heads": None, "max_position_embeddings": 100},
    {"head_dim": None},
)
"""What a model can be told to be while its weights stay; None = it is not said."""


def _check_other_configs(rig: Rig, path: Path, own: ModelInfo) -> None:
    if rig.backend not in {"reference", *(backend.name for backend in infercore.backends())}:
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / path.name
        shutil.copytree(path, folder)
        file = folder / "config.json"
        file.chmod(0o600)
        config = json.loads(file.read_text(encoding="utf-8"))
        for fields in _OTHER_CONFIGS:
            other = {name: v for name, v in {**config, **fields}.items() if v is not None}
            file.write_text(json.dumps(other), encoding="utf-8")
            try:
                opened = loaded(rig, str(folder))
            except InferCoreError as error:
                that(not isinstance(error, PluginError), f"a config with {fields}: {error}")
                foreseen(error, f"a config with {fields}")
                continue
            with opened as model:
                compare_with_config(model, folder, own)
                if rig.backend != "reference":
                    _check_windows(rig, str(folder), model, fields)
                    if "head_dim" in fields:
                        _check_heads(rig, str(folder), config)
        file.write_text(json.dumps(config), encoding="utf-8")
        _check_recommended(rig, folder)


def _check_recommended(rig: Rig, folder: Path) -> None:
    """Of what the files recommend for sampling all is told, or nothing."""
    said = {"temperature": 0.7, "top_k": 41, "top_p": 0.85}
    file = folder / "generation_config.json"
    file.unlink(missing_ok=True)
    file.write_text(json.dumps(said), encoding="utf-8")
    with loaded(rig, str(folder)) as model:
        told = dict(model.info.sampling)
        equal(told, said if told else {}, "what the files recommend for sampling")


def _check_heads(rig: Rig, path: str, config: dict[str, Any]) -> None:
    """Heads share the width where their size is not said: the same cache is planned."""
    names = ("hidden_size", "num_attention_heads", "head_dim")
    width, *heads = (int(config.get(name) or 0) for name in names)
    if all(heads) and width == math.prod(heads):
        with contextlib.suppress(UnsupportedFeatureError):
            usual = rig.model.plan_memory(n_ctx=64).kv_bytes
            found = infercore.plan_memory(
                path, backend=rig.backend, check_in_child=False, n_ctx=64
            ).kv_bytes
            equal(found, usual, "bytes of a cache whose heads' size is not said")


def _check_windows(rig: Rig, path: str, model: Any, fields: dict[str, Any]) -> None:
    """The window where nobody asks for one, and the trained one, are planned without loading, too.

    Where the files state no trained one, it is refused.
    """
    planned = partial(infercore.plan_memory, path, backend=rig.backend, check_in_child=False)
    with contextlib.suppress(UnsupportedFeatureError):
        for n_ctx in (None, 0):
            if n_ctx is None or model.info.n_ctx_train:
                plans = [made(n_ctx=n_ctx).n_ctx for made in (model.plan_memory, planned)]
                equal(plans[1], plans[0], f"the window of n_ctx={n_ctx} with {fields}")
                continue
            error = raises(InvalidInputError, lambda: planned(n_ctx=0), f"n_ctx=0 with {fields}")
            facts = error.field, error.value, bool(error.allowed)
            equal(facts, ("n_ctx", 0, True), "field and value of the error, and what is allowed")


def _as_header(model: Any, header: gguf.Header) -> None:
    info, metadata = model.info, header.metadata
    equal(info.architecture, header.architecture, "architecture")
    said = {name: header.own(key) for name, key in _OF_INFO.items()}
    n_head_kv = header.own("attention.head_count_kv")
    _compare(info, {**said, "n_head_kv": said["n_head"] if n_head_kv is None else n_head_kv})
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens is not None:
        equal((info.n_vocab, model.tokenizer.n_vocab), (len(tokens), len(tokens)), "n_vocab")
    if metadata.get("split.count", 1) <= 1:  # of several files this one has a part of the tensors
        _compare_sizes(info, header)
    for key, value in metadata.items():
        if isinstance(value, (str, int)) and key != "tokenizer.chat_template":
            text = str(value).lower() if isinstance(value, bool) else str(value)
            equal(info.metadata.get(key), text, f"metadata of {key}")
    for name, key in _IDS.items():
        asked = metadata.get(f"tokenizer.ggml.{key}")
        if asked is not None:
            equal(getattr(model.tokenizer, name), asked, name)
    template = metadata.get("tokenizer.chat_template")
    equal(model.tokenizer.chat_template, template, "the chat template")
    _compare_kinds(model.tokenizer, metadata)
    _compare_rope(model, header)


def _compare_rope(model: Any, header: gguf.Header) -> None:
    """What is in force where nobody asks is what the header says."""
    base, yarn = header.own("rope.freq_base"), header.own("rope.scaling.type") == "yarn"
    if base is None or model.info.has_encoder:
        return
    with model.new_context(n_ctx=32) as context:
        told = context.effective
    equal(told["rope_freq_base"], base, "the base of rope")
    equal(told["rope_scaling_type"], header.own("rope.scaling.type") or "linear", "its scaling")
    if not yarn:
        facts = (told["rope_freq_scale"], told["yarn_ext_factor"], told["yarn_attn_factor"])
        equal(facts[1:], (0.0, 1.0), "factors of YaRN, which is not used")
        equal(facts[0], 1.0 / (header.own("rope.scaling.factor") or 1.0), "the scale of rope")


def _compare_kinds(tokenizer: Any, metadata: Any) -> None:
    """Compare kinds and scores; an engine may know more tokens for control tokens than the file."""
    kinds = metadata.get("tokenizer.ggml.token_type") or ()
    scores = metadata.get("tokenizer.ggml.scores") or ()
    is_scored = metadata.get("tokenizer.ggml.model") in _SCORED
    for token, kind in enumerate(kinds[:_SOME]):
        found = tokenizer.token_kind(token)
        if kind in _KINDS and found != "control":
            equal(found, _KINDS[kind], f"the kind of token {token}")
        that(kind != 6 or found == "byte", f"token {token}, a byte, is of kind {found!r}")  # noqa: PLR2004
    for token, score in enumerate(scores[:_SOME] if is_scored else ()):
        equal(tokenizer.token_score(token), score, f"the score of token {token}")
    if metadata.get("tokenizer.ggml.model") and not is_scored:
        equal(tokenizer.token_score(0), None, "the score of a token, where files have none")


def _compare(info: Any, said: dict[str, Any]) -> None:
    """Raise `LawError` where ``info`` is not as said; what is no number of the kind is left out.

    Of numbers for each layer ``info`` has one. An encoder may take less than its positions, as
    some are kept for padding.
    """
    for name, value in said.items():
        found = getattr(info, name) or 0
        if isinstance(value, tuple):
            that(found in value, f"{name} is {found}, of the layers it is {value}")
        elif name == "n_ctx_train" and info.has_encoder and type(value) is int:
            that(found <= value, f"{name} is {found}, there are {value} positions")
        elif type(value) is int:
            equal(found, value, name)


def _compare_sizes(info: Any, header: gguf.Header) -> None:
    sizes = {tensor: math.prod(tensor.dims) for tensor in header.tensors.values()}
    equal(info.n_params, sum(sizes.values()), "n_params")
    if all(tensor.kind in _BYTES_OF_32 for tensor in sizes):
        n_bytes = sum(n * _BYTES_OF_32[tensor.kind] // 32 for tensor, n in sizes.items())
        equal(info.size_bytes, n_bytes, "size_bytes")


def compare_with_config(model: Any, folder: Path, own: ModelInfo | None = None) -> None:
    """Compare with the config; what a graph or weights decide may also be as in ``own``."""
    info, config = model.info, json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads = config.get("num_attention_heads")
    said = {
        "n_vocab": config.get("vocab_size"),
        "n_embd": config.get("hidden_size"),
        "n_layer": config.get("num_hidden_layers"),
        "n_head": heads,
        "n_head_kv": config.get("num_key_value_heads") or heads,
        "n_ctx_train": config.get("max_position_embeddings"),
        "sliding_window": config.get("sliding_window") if _slides(config) else 0,
    }
    decided = _OF_GRAPHS[:1] if (folder / "model.safetensors").is_file() else _OF_GRAPHS
    for name in decided if own is not None else ():
        if getattr(info, name) == getattr(own, name):
            del said[name]
    _compare(info, said)
    if isinstance(config.get("model_type"), str):
        equal(info.architecture, config["model_type"], "architecture")
    for name, value in config.items():
        if type(value) in (int, str) and name in info.metadata:
            told = info.metadata[name]
            is_said = told in (str(value), json.dumps(value))
            that(is_said, f"metadata of {name} is {told!r}, the config says {value!r}")
    _compare_named(model.tokenizer, folder / "tokenizer_config.json")
    weights = folder / "model.safetensors"
    if weights.is_file():
        shapes, n_bytes = _of_safetensors(weights)
        equal(info.n_params, sum(shapes), "n_params")
        fits = n_bytes <= info.size_bytes <= weights.stat().st_size
        that(fits, f"size_bytes is {info.size_bytes}, of weights there are {n_bytes}")


def _compare_named(tokenizer: Any, file: Path) -> None:
    """Compare what a tokenizer's config names with what the ids stand for."""
    named = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    for name in _IDS:
        text = named.get(f"{name}_token")
        text = text.get("content") if isinstance(text, dict) else text
        if isinstance(text, str) and (token := getattr(tokenizer, name)) is not None:
            equal(tokenizer.token_bytes(token), text.encode(), f"the token that {name} names")


def _slides(config: dict[str, Any]) -> bool:
    kinds = config.get("layer_types")
    return config.get("use_sliding_window") is not False and (
        not isinstance(kinds, list) or "sliding_attention" in kinds
    )


def _of_safetensors(file: Path) -> tuple[list[int], int]:
    """Return how many numbers each tensor has, and the bytes of all."""
    with file.open("rb") as opened:
        header = json.loads(opened.read(_TEXT.unpack(opened.read(8))[0]))
    header.pop("__metadata__", None)
    n_bytes = sum(last - first for first, last in (t["data_offsets"] for t in header.values()))
    return [math.prod(tensor["shape"]) for tensor in header.values()], n_bytes


# -- headers that lie ------------------------------------------------------------------------------


@law("BAD-18", model="any", since="1.2")
def check_headers_that_lie(rig: Rig) -> None:
    """A header or config with impossible values raises a typed error that names the path.

    Without a child to try it in, and never by a mistake of the plugin's own. What a config.json
    says may also be of no use to the engine. The rig's own files that are no models
    (`Rig.wrong_files`) are refused in the same way.
    """
    _need_its_name(rig)
    for write in rig.wrong_files:
        with tempfile.TemporaryDirectory() as folder:
            _check_no_model(rig, write(folder), getattr(write, "__name__", str(write)))
    paths = [path for path, _ in _models(rig) if bytes_of(path) <= MAX_COPIED]
    if not paths:
        rig.leave(f"the model has more than {MAX_COPIED >> 20} MiB, too much to copy")
    paths = [path for path in paths if is_gguf(path) or (path / "config.json").is_file()]
    if not paths:
        rig.leave("the model is neither a GGUF file nor a folder with a config.json to lie in")
    with tempfile.TemporaryDirectory() as kept:
        written = [_with_a_lie(path, kept) for path in paths if is_gguf(path)]
        _check_lies(rig, paths)
        for file in written:  # also where it is no longer new
            _tried(rig, str(file), f"{_OLD_LIE}, read long after it was written", must=True)


_OLD_LIE = "with 513 layers"


def _with_a_lie(path: Path, folder: str) -> Path:
    """Return a copy in ``folder`` of which one number is wrong."""
    lies = dict(_lies_of_sizes(path.read_bytes(), gguf.read(str(path))))
    file = Path(folder) / path.name
    file.write_bytes(lies[_OLD_LIE])
    return file


def _check_lies(rig: Rig, paths: list[Path]) -> None:
    for path in paths:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / path.name
            shutil.copytree(path, copy) if path.is_dir() else shutil.copy(path, copy)
            changed = copy / "config.json" if path.is_dir() else copy
            changed.chmod(0o600)
            whole = changed.read_bytes()
            for what, data in _lies_of(path, whole):
                changed.write_bytes(data)
                _tried(rig, str(copy), what, must=not path.is_dir())
            for what, data in _other_types(path) if is_gguf(path) else ():
                changed.write_bytes(data)
                _tried(rig, str(copy), what, must=False)


def bytes_of(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else (path,)
    return sum(file.stat().st_size for file in files if file.is_file())


def _tried(rig: Rig, path: str, what: str, *, must: bool) -> None:
    """Raise `LawError` unless the model at ``path`` is refused as it should, or may be loaded."""
    try:
        with loaded(rig, path) as model:
            if not must and any(Path(path).glob("*.safetensors")):
                _use(model)
    except (PluginError, SessionFatalError) as error:
        that(condition=False, text=f"{what}: {error}")
    except ModelLoadError as error:
        foreseen(error, what)
        that(path in str(error.path), f"{what}: the path of the error is {error.path!r}")
        that(len(str(error)) > len(path) + 10, f"{what}: the error says only {error}")
    except InferCoreError:
        return
    else:
        that(not must, f"{what}: it was loaded")


def _check_no_model(rig: Rig, path: str, what: str) -> None:
    error = raises(ModelLoadError, lambda: loaded(rig, path).close(), what)
    foreseen(error, what)
    that(path in str(error.path), f"{what}: the path of the error is {error.path!r}")


def _use(model: Any) -> None:
    """Compute a few tokens with what was loaded."""
    with model.new_context(n_ctx=16) as context:
        (context.encode if model.info.has_encoder else context.decode)([5, 6, 7])


def _need_its_name(rig: Rig) -> None:
    if rig.backend not in {"reference", *(backend.name for backend in infercore.backends())}:
        rig.leave("the backend is not announced, so users cannot load with it by name")


def loaded(rig: Rig, path: str) -> Any:
    """Return the model at ``path``, loaded without a child to try it in."""
    _need_its_name(rig)
    if rig.backend == "reference":
        return load_reference_model(path)
    return infercore.load_model(path, backend=rig.backend, check_in_child=False)


def _lies_of(path: Path, whole: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield what is changed, and the file with it."""
    if path.is_dir():
        yield from _lies_of_a_config(json.loads(whole))
        return
    header = gguf.read(str(path))
    yield from _lies_of_sizes(whole, header)
    yield from _lies_of_numbers(whole, header)
    yield from _lies_of_tensors(whole, header)
    yield from _lies_of_entries(path, header)


_WRONG_NUMBERS: tuple[Any, ...] = (0, -1, 2**40, 0.5, "4", None, [], [1], {"a": 1})


def _lies_of_a_config(config: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Each number of a config, with a value that none of its kind has; texts and lists as 5."""
    keys = [key for key, value in config.items() if isinstance(value, (int, float))]
    for i, key in enumerate(keys):
        wrong = _WRONG_NUMBERS[i % len(_WRONG_NUMBERS)]
        more: tuple[Any, ...] = ("4x", [], None) if isinstance(config[key], float) else ()
        for other in (wrong, *more):
            yield f"{key} of {other!r}", json.dumps({**config, key: other}).encode()
    for key in [key for key, value in config.items() if isinstance(value, (str, list))]:
        yield f"{key} of 5", json.dumps({**config, key: 5}).encode()


def _lies_of_sizes(data: bytes, header: gguf.Header) -> Iterator[tuple[str, bytes]]:
    for at in (4, 8, 23, 24, 25, len(data) // 3):
        yield f"cut after {at} bytes", data[:at]
    yield "of version 99", data[:4] + _U32.pack(99) + data[8:]
    for place, what in ((8, "tensors"), (16, "entries")):
        for n in (2**20, 2**62):
            yield f"with {n} {what}", data[:place] + _TEXT.pack(n) + data[place + 8 :]
    for n in (0, 513, 2**31):
        yield (
            f"with {n} layers",
            set_number(data, f"{header.architecture}.block_count", _U32.pack(n)),
        )


def _lies_of_numbers(data: bytes, header: gguf.Header) -> Iterator[tuple[str, bytes]]:
    for key, value in header.metadata.items():
        if key.endswith("_epsilon") and isinstance(value, float):
            for number in (-1.0, math.nan, math.inf):
                yield f"{key} of {number}", set_number(data, key, _F32.pack(number))
        if key.endswith("pooling_type"):
            yield f"{key} of 17", set_number(data, key, _U32.pack(17))
    tokens: tuple[bytes, ...] = header.metadata["tokenizer.ggml.tokens"]
    twin = next((i for i in range(1, len(tokens)) if len(tokens[-i]) == len(tokens[-i - 1])), None)
    if twin is not None:
        old, new = (_TEXT.pack(len(t)) + t for t in (tokens[-twin], tokens[-twin - 1]))
        at = data.index(b"tokenizer.ggml.tokens")
        yield "with one token twice", data[:at] + data[at:].replace(old, new, 1)


def _lies_of_tensors(data: bytes, header: gguf.Header) -> Iterator[tuple[str, bytes]]:
    vectors = [t for t in header.tensors.values() if len(t.dims) == 1]
    matrices = [t for t in header.tensors.values() if len(t.dims) == 2]  # noqa: PLR2004
    for tensor, kind in (
        (vectors[-1], _F16), (matrices[0], _I32), (matrices[-1], _I32), (matrices[-1], _NO_TYPE),
    ):  # fmt: skip
        yield f"with {tensor.name} of type {kind}", _retyped(data, tensor, kind)


_SIZES_OF_NO_WEIGHTS = {9: (32, 36), 24: (1, 1), 25: (1, 2), 27: (1, 8), 28: (1, 8)}
"""How many numbers take how many bytes: 8 bits between two products, integers, doubles."""


def _other_types(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield each entry as a text and as a number, whichever it is not."""
    own = gguf_copy.read(path)
    for key, said in own.entries.items():
        for value in (gguf_copy.text("four"), number(UINT32, 5)):
            if value[:4] != said[:4]:
                changed = attrs.evolve(own, entries={**own.entries, key: value})
                yield f"with {key} of another type", changed.to_bytes()
    architecture = gguf.read(str(path)).architecture
    for factor in (0.0, -1.0, math.nan):
        entries = {f"{architecture}.rope.scaling.factor": number(FLOAT32, factor)}
        entries[f"{architecture}.rope.scaling.type"] = gguf_copy.text("linear")
        scaled = attrs.evolve(own, entries={**own.entries, **entries})
        yield f"with a factor of rope of {factor}", scaled.to_bytes()


def _lies_of_entries(path: Path, header: gguf.Header) -> Iterator[tuple[str, bytes]]:
    """Yield entries that no model has, over which an engine may end the process."""
    own, kind = gguf_copy.read(path), header.architecture
    n_layer: int = header.own("block_count")
    last, _ = [t for t in own.tensors if len(t[0].dims) == 2][-1]  # noqa: PLR2004
    for number_of, (n, size) in _SIZES_OF_NO_WEIGHTS.items():
        zeros = dataclasses.replace(last, kind=number_of), bytes(math.prod(last.dims) // n * size)
        tensors = [zeros if tensor is last else (tensor, data) for tensor, data in own.tensors]
        told = f"with {last.name} of zeros of type {number_of}"
        yield told, attrs.evolve(own, tensors=tensors).to_bytes()
    for fields in (
        {"rope.scaling.type": gguf_copy.text("sideways")},
        {"block_count": gguf_copy.text("four")},
        {"block_count": number(BOOL, value=True)},
        {"pooling_type": number(UINT32, 5)},
        {"pooling_type": gguf_copy.text("mean")},
        {"expert_count": number(UINT32, 4)},
        {"expert_used_count": number(UINT32, 2)},
        {"expert_count": number(UINT32, 4), "expert_used_count": number(UINT32, 5)},
        {
            "expert_count": number(UINT32, 4),
            "expert_used_count": gguf_copy.numbers("i", [5, *[1] * (n_layer - 1)]),
        },
    ):
        entries = {f"{kind}.{key}": value for key, value in fields.items()}
        changed = attrs.evolve(own, entries={**own.entries, **entries})
        yield f"with another {' and '.join(fields)}", changed.to_bytes()
    yield "that is an adapter", own.other(general__type=gguf_copy.text("adapter")).to_bytes()


def set_number(data: bytes, key: str, value: bytes) -> bytes:
    """Return the file with a number in place of that of ``key``."""
    name = key.encode()
    at = data.index(_TEXT.pack(len(name)) + name) + 8 + len(name) + 4
    return data[:at] + value + data[at + len(value) :]


def _retyped(data: bytes, tensor: gguf.Tensor, kind: int) -> bytes:
    name = tensor.name.encode()
    at = data.index(_TEXT.pack(len(name)) + name) + 8 + len(name) + 4 + 8 * len(tensor.dims)
    return data[:at] + _U32.pack(kind) + data[at + 4 :]
