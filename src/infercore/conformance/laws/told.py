"""What a backend says of itself, and what it was asked for, is measured."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import shutil
import struct
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import infercore
from infercore.conformance import gguf_copy, safetensors_copy
from infercore.conformance.expect import equal, foreseen, raises, that
from infercore.conformance.law import law
from infercore.conformance.laws.formats import accepted_types
from infercore.conformance.laws.headers import is_gguf
from infercore.conformance.laws.settings import decides, write
from infercore.conformance.oracle import Way, Yarn
from infercore.errors import (
    BackendUnavailableError,
    DecodeAbortedError,
    InferCoreError,
    InvalidInputError,
    ModelLoadError,
    SnapshotError,
    UnsupportedFeatureError,
)
from infercore.testing import engine_of, load_reference_model
from infercore.values.config import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from infercore.conformance.rig import Rig

REFUSED = (UnsupportedFeatureError, InvalidInputError, BackendUnavailableError)
_INFO = {
    "n_vocab": "vocab_size",
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_head_kv": "num_key_value_heads",
    "n_ctx_train": "max_position_embeddings",
}


def _row(rig: Rig, tokens: list[int], **fields: Any) -> Any:
    """Return the logits with these fields, None where they are refused."""
    try:
        context = rig.context(**fields)
    except REFUSED:
        return None
    context.decode(tokens[:-1])
    context.decode_one(tokens[-1])  # reads the cache, in whatever type it is kept
    for name, value in fields.items():
        if name in context.effective:
            equal(context.effective[name], value, f"effective[{name!r}]")
    return np.array(context.logits())


@law("CAP-22", since="1.2")
def check_info_is_of_the_files(rig: Rig) -> None:
    """The shape that a model reports is that of the files the oracle reads."""
    oracle, info = rig.need_oracle(), rig.model.info
    config = oracle.config
    found = {name: getattr(info, name) for name in _INFO}
    equal(found, {name: int(config[key]) for name, key in _INFO.items()}, "shape of the model")
    flags = (info.is_recurrent, info.is_hybrid, bool(info.sliding_window), info.has_encoder)
    equal(flags, (False,) * 4, "whether it is recurrent, hybrid, sliding, an encoder")
    equal(rig.tokenizer.bos, config.get("bos_token_id"), "bos")
    equal(info.n_params, oracle.n_weights, "n_params")
    if rig.path is not None and not info.is_recurrent:
        size = _size(rig.path)
        that(0.5 * size <= info.size_bytes <= size, f"{info.size_bytes} bytes of {size} in files")


def _size(path: str) -> int:
    where = Path(path)
    return (
        sum(f.stat().st_size for f in where.rglob("*")) if where.is_dir() else where.stat().st_size
    )


_BETAS = {"beta_fast": 1.5, "beta_slow": 0.05}
_RAMP = {"yarn_orig_ctx": 64, **{f"yarn_{name}": value for name, value in _BETAS.items()}}
"""Of these the ramp lies within the frequencies of heads of 16 numbers and more."""


@law("CAP-23", since="1.2")
def check_rope_options_are_used(rig: Rig) -> None:
    """Another RoPE base or scale, and YaRN, give the oracle's logits or are refused."""
    oracle = rig.need_oracle()
    tokens = rig.tokens(24)
    linear = {"rope_scaling_type": "linear", "rope_freq_scale": 0.5}
    yarn = {"rope_scaling_type": "yarn", "rope_freq_scale": 0.25}
    longer = {**yarn, "yarn_orig_ctx": 64, "yarn_beta_fast": 8.0, "yarn_beta_slow": 0.5}
    trained = rig.model.info.n_ctx_train
    mixed = Yarn(orig_ctx=64, beta_fast=8.0, beta_slow=0.5)
    for fields, way in (
        ({"rope_freq_base": 5000.0}, Way(rope_base=5000.0)),
        (linear, Way(rope_scale=0.5)),
        ({**linear, "rope_freq_base": 20_000.0}, Way(rope_base=20_000.0, rope_scale=0.5)),
        (yarn, Way(rope_scale=0.25, yarn=Yarn(orig_ctx=trained))),
        (longer, Way(rope_scale=0.25, yarn=mixed)),
        ({**yarn, **_RAMP}, Way(rope_scale=0.25, yarn=Yarn(orig_ctx=64, **_BETAS))),
        (
            {**yarn, **_RAMP, "yarn_ext_factor": 0.5},
            Way(rope_scale=0.25, yarn=Yarn(orig_ctx=64, ext_factor=0.5, **_BETAS)),
        ),
        (
            {**yarn, "yarn_ext_factor": 0.0, "yarn_attn_factor": 1.5},
            Way(rope_scale=0.25, attn_factor=1.5),
        ),
        (
            {**yarn, "rope_freq_base": 100.0, "yarn_orig_ctx": 4096},
            Way(rope_base=100.0, rope_scale=0.25, yarn=Yarn(orig_ctx=4096)),
        ),
        ({**yarn, "yarn_attn_factor": 1.5}, None),
        ({"rope_scaling_type": "none"}, Way()),
    ):
        row = _row(rig, tokens, **fields)
        if row is not None and way is not None:
            rig.near(row, oracle.rows(tokens, way)[-1], f"logits with {fields}")
        elif row is not None:  # a factor of its own is used, or refused
            without = _row(rig, tokens, **{k: v for k, v in fields.items() if "attn" not in k})
            that(not np.array_equal(row, without), f"{fields}: the factor changes nothing")
    _check_no_scaling(rig, tokens, oracle.rows(tokens)[-1])
    factors = {"rope_scaling_type": "longrope"}  # which a plain llama's files do not have
    that(_row(rig, tokens, **factors) is None, "longrope is taken without its factors")


def _check_no_scaling(rig: Rig, tokens: list[int], plain: Any) -> None:
    """A scale without scaling is not used, or refused; what a refusal allows is taken then."""
    asked = {"rope_scaling_type": "none", "rope_freq_scale": 0.5}
    try:
        context = rig.context(**asked)
    except InvalidInputError as error:
        equal(error.value, asked.get(str(error.field)), f"the value of {error.field} refused")
        that(error.allowed not in (None, ""), "the refusal says not what is allowed")
        if isinstance(error.allowed, float):
            rig.context(**{**asked, str(error.field): error.allowed})
    except (UnsupportedFeatureError, BackendUnavailableError):
        return
    else:
        equal(context.effective["rope_freq_scale"], 1.0, "the scale that is in force")
        context.decode(tokens)
        rig.near(context.logits(), plain, "no scaling, whatever the scale")


@law("CAP-24", since="1.2")
def check_attention_type_is_used(rig: Rig) -> None:
    """Without causal attention each token sees the whole call, as in the oracle; or is refused.

    So does each of a later call, which sees what went before it too. Contexts with causal
    attention that stay open beside it go on.
    """
    oracle = rig.need_oracle()
    tokens = rig.tokens(20)
    causal = rig.context()
    causal.decode(tokens[:12])
    try:
        context = rig.context(attention_type="non-causal")
    except REFUSED:
        return
    equal(context.effective["attention_type"], "non-causal", "effective attention_type")
    past, way = oracle.nothing(), Way(causal=False)
    for part in (tokens[:12], tokens[12:]):
        context.decode(part)
        past, hidden = oracle.append(past, part, way)
        expected = oracle.logits(hidden[-1:])[0]
        rig.near(context.logits(), expected, f"logits without causal attention, {len(past.tokens)}")
    causal.decode(tokens[12:])
    expected = rig.cold(tokens)
    rig.near(causal.logits(), expected, "logits with causal attention beside one without")


@law("CAP-25", since="1.2")
def check_types_of_keys_and_values_are_used(rig: Rig) -> None:
    """A narrower type of K alone, and of V alone, each changes what is computed, or is refused."""
    if "f16" not in rig.context().capabilities.kv_types or len(rig.exact) == 0:
        rig.leave("there is one type of KV cache only")
    tokens = rig.tokens(40)
    plain = _row(rig, tokens, type_k="f32", type_v="f32")
    found = []
    for fields in ({"type_k": "f16", "type_v": "f32"}, {"type_k": "f32", "type_v": "f16"}):
        row = _row(rig, tokens, **fields)
        if row is None or plain is None:
            continue
        that(not np.array_equal(row, plain), f"{fields} changes nothing")
        found.append(row.tobytes())
    equal(len(set(found)), len(found), "different logits with K or V in half precision")


@law("CAP-26", model="any", since="1.2")
def check_model_options_are_used_or_refused(rig: Rig) -> None:
    """A device that does not exist is always refused, and so is any option without effect.

    Weights are mapped and locked as requested, and checked where that is requested.
    """
    if rig.backend != "reference" and rig.backend not in {b.name for b in infercore.backends()}:
        rig.leave("the backend is not announced, so users cannot load with it by name")
    refused: list[dict[str, Any]] = [{"device": "NO_SUCH_DEVICE:7"}, {"main_gpu": 200}]
    refused += [{"device": f"{name}_2x"} for name in ("cpu", "CPU")]
    if not rig.model.capabilities.gpu_offload:
        refused += [{"n_gpu_layers": 20}, {"tensor_split": (0.5, 0.5)}, {"split_mode": "row"}]
    for fields in refused:
        raises(InferCoreError, lambda f=fields: _load(rig, f).close(), f"loading with {fields}")
    with tempfile.TemporaryDirectory() as folder:
        where = _copy(_path(rig), folder).resolve()  # as the system names what is mapped
        if Path("/proc/self/maps").exists():
            _check_mapped(rig, str(where))
            _check_locked(rig, str(where))
        _check_numbers(rig, where)


def _check_numbers(rig: Rig, where: Path) -> None:
    """Weights that are no numbers are found where that is requested, wherever they are."""
    file = _largest(where)
    file.chmod(0o600)
    whole = file.read_bytes()
    blocks = {"no numbers": b"\xff" * 1024}  # of any format: its scale is no number
    if _is_in_single_precision(file):
        blocks["infinite numbers"] = struct.pack("<f", math.inf) * 256
    places = [at // 4 * 4 for at in (len(whole) // 2, len(whole) * 3 // 4, len(whole) - 1024)]
    for (kind, block), at in itertools.product(blocks.items(), places):
        damaged = bytearray(whole)
        damaged[at : at + len(block)] = block
        file.write_bytes(damaged)
        what = f"{kind} {at} bytes into the file"
        error = raises(
            InferCoreError, lambda: _load(rig, {"check_tensors": True}, str(where)).close(), what
        )
        if isinstance(error, ModelLoadError):
            that(str(where) in str(error.path), f"{what}: the path of the error is {error.path!r}")


def _is_in_single_precision(file: Path) -> bool:
    """Whether all weights of the file are known to be float32, in multiples of 4 bytes."""
    if file.suffix == ".safetensors":
        return {tensor.kind for tensor in safetensors_copy.read(file).values()} == {"F32"}
    return is_gguf(file) and {tensor.kind for tensor, _ in gguf_copy.read(file).tensors} == {0}


def _check_mapped(rig: Rig, path: str) -> None:
    for wanted in (True, False):
        try:
            model = _load(rig, {"use_mmap": wanted}, path)
        except REFUSED:
            continue
        with model:
            maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
            equal(path in maps, wanted, f"with use_mmap={wanted}, whether the file is mapped")


def _check_locked(rig: Rig, path: str) -> None:
    before = _locked_bytes()
    try:
        model = _load(rig, {"use_mlock": True}, path)
    except InferCoreError:  # the system may allow too little
        return
    with model:
        locked, size = _locked_bytes() - before, rig.model.info.size_bytes
        that(2 * locked >= size, f"with use_mlock=True {locked} bytes are locked, of {size}")


def _locked_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmLck")]
    return 1024 * int(found[0]) if found else 0


def _load(rig: Rig, fields: Mapping[str, Any], path: str | None = None) -> Any:
    """Load the rig's model with these fields as users do, by the name of the backend."""
    where = path or _path(rig)
    if rig.backend == "reference":
        return load_reference_model(where, config=ModelConfig(**fields))
    return infercore.load_model(where, backend=rig.backend, **fields)


def _path(rig: Rig) -> str:
    if rig.path is None:
        rig.leave("the rig names no path")
    return rig.path


@law("CAP-27", since="1.2")
def check_the_tolerance_holds(rig: Rig) -> None:
    """A context's own tolerance holds for its own logits over splits; 0 means the same bits.

    In each type of K and V too, and with flash attention.
    """
    rig.need_all_logits()
    tokens = rig.tokens(60)
    default = {"n_ctx": rig.n_ctx, "n_batch": 64}
    typed = [rig.fields(**fields) for fields in accepted_types(rig)]
    with contextlib.suppress(InvalidInputError, UnsupportedFeatureError):
        rig.model.new_context(**rig.fields(flash_attn="on")).close()
        typed.append(rig.fields(flash_attn="on"))
    try:
        rig.model.new_context(**default).close()
    except UnsupportedFeatureError:  # calls of another size than its own
        default = rig.fields()
    for fields in (rig.fields(), default, *typed):
        rows = []
        for cut in (60, 59, 30, 1):
            with rig.model.new_context(**fields) as context:
                context.decode(tokens[:cut])
                for start in range(cut, 60, 11):
                    context.decode(tokens[start : start + 11])
                rows.append(np.array(context.logits()))
                stated = context.tolerance
        gap = max(float(np.abs(row - rows[0]).max()) for row in rows)
        that(gap <= stated, f"{gap:.3g} over splits with {fields}, {stated:.3g} stated")


# -- identity --------------------------------------------------------------------------------------


@law("CAP-28", since="1.2")
def check_a_flipped_bit_is_another_model(rig: Rig) -> None:
    """A copy with one bit of the weights flipped has another digest; state is not exchanged.

    Where the format has checksums of its own, it may be refused as damaged. Where config.json says
    what is computed, another config has another digest, too, or is refused.
    """
    path = _path(rig)
    with tempfile.TemporaryDirectory() as folder:
        if decides(Path(path)):
            _check_another_config(rig, _copy(path, str(Path(folder) / "again")))
        where = _copy(path, folder)
        file = _largest(where)
        file.chmod(0o600)
        os.utime(file, (_LONG_AGO, _LONG_AGO))  # digests of times and sizes are no digests
        with rig.open_at(str(where)) as same:
            equal(same.digest, rig.model.digest, "digest of a copy")
        _flip(file)
        os.utime(file, (_LONG_AGO, _LONG_AGO))
        try:
            other = rig.opened(rig.open_at(str(where)))
        except ModelLoadError:
            return
        with other:
            that(other.digest != rig.model.digest, "a flipped bit of the weights: the same digest")
            if rig.context().capabilities.sequence_state:
                source = rig.context()
                source.decode(rig.tokens(5))
                data = source.save_sequence(0)
                with other.new_context(**rig.fields()) as context:
                    raises(SnapshotError, lambda: context.load_sequence(0, data), "its state")


def _check_another_config(rig: Rig, where: Path) -> None:
    file = where / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    rope = config.get("rope_parameters") or {}
    others = [
        {name: config[name] * 1.5}
        for name in ("rms_norm_eps", "rope_theta")
        if isinstance(config.get(name), float)
    ]
    if isinstance(rope.get("rope_theta"), float):
        others.append({"rope_parameters": {**rope, "rope_theta": rope["rope_theta"] * 1.5}})
    for fields in others:
        write(file, {**config, **fields})
        try:
            with rig.open_at(str(where)) as other:
                that(other.digest != rig.model.digest, f"config.json with {fields}: one digest")
        except ModelLoadError as error:
            foreseen(error, f"config.json with {fields}")


_LONG_AGO = 1e9


def _copy(path: str, folder: str) -> Path:
    target = Path(folder) / Path(path).name
    if Path(path).is_dir():
        shutil.copytree(path, target)
    else:
        shutil.copy(path, target)
    return target


def _largest(where: Path) -> Path:
    files = [f for f in where.rglob("*") if f.is_file()] if where.is_dir() else [where]
    return max(files, key=lambda file: file.stat().st_size)


def _flip(file: Path) -> None:
    """Flip the lowest bit of a number in the last quarter, where a file has its weights."""
    file.chmod(0o600)
    with file.open("r+b") as opened:
        at = file.stat().st_size * 3 // 4 // 4 * 4
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 1]))


# -- memory, files, threads ------------------------------------------------------------------------


_BYTES_OF_32 = {"f32": 128, "f16": 64, "bf16": 64, "q8_0": 34}
"""Bytes that 32 numbers of a type take."""


@law("MEM-7", needs="plan_memory", since="1.2")
def check_the_plan_is_of_the_shape(rig: Rig) -> None:
    """The planned cache is 2 x window x layers x K/V heads x head size x bytes of its type.

    Up to half as much again, as engines round up, however many sequences share it; without types it
    is of those in force. The weights are a good part of the files, and larger steps take more.
    """
    config = rig.need_oracle().config
    head = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    info = rig.model.info
    n_values = 2 * info.n_layer * info.n_head_kv * head
    for fields in accepted_types(rig):
        if not {fields["type_k"], fields["type_v"]} <= _BYTES_OF_32.keys():
            continue
        n_bytes = (_BYTES_OF_32[fields["type_k"]] + _BYTES_OF_32[fields["type_v"]]) / 64
        kind = f"{fields['type_k']} and {fields['type_v']}"
        for n_ctx in (512, 2048):
            asked = rig.fields(**{**fields, "n_ctx": n_ctx})
            exact = n_values * n_ctx * n_bytes
            for n_seq_max in (1, 4) if rig.context().capabilities.multi_sequence else (1,):
                found = rig.model.plan_memory(**{**asked, "n_seq_max": n_seq_max}).kv_bytes
                what = f"{n_ctx} tokens of {kind} in {n_seq_max} sequences"
                fits = 0.98 * exact <= found <= 1.5 * exact  # engines round what they log
                that(fits, f"{found} bytes planned for {what}, not {exact}")
    own = {name: value for name, value in rig.fields().items() if not name.startswith("type_")}
    types = rig.opened(rig.model.new_context(**own)).effective
    told = {name: types[name] for name in ("type_k", "type_v") if types.get(name) is not None}
    sizes = [rig.model.plan_memory(**{**own, **fields}).kv_bytes for fields in ({}, told)]
    equal(sizes[0], sizes[1], f"bytes planned without types, and for those in force, {told}")
    if {"f32", "f16"} <= set(rig.context().capabilities.kv_types):
        narrower = {"n_ctx": 2048, "type_k": "f16", "type_v": "f16"}
        wider = {"n_ctx": 2048, "type_k": "f32", "type_v": "f32"}
        sizes = [rig.model.plan_memory(**rig.fields(**each)).kv_bytes for each in (wider, narrower)]
        that(sizes[1] < 0.75 * sizes[0], f"{sizes[1]} bytes in f16 and {sizes[0]} in f32 planned")
        with contextlib.suppress(*REFUSED):
            context = rig.context(type_k="f32", type_v="f16")
            fields = {"n_ctx": 2048, "type_k": "f32", "type_v": "f16"}
            mixed = rig.model.plan_memory(**rig.fields(**fields)).kv_bytes
            that(sizes[1] < mixed < sizes[0], f"{mixed} bytes planned with V alone in f16")
            context.close()
    steps = rig.model.plan_memory(**rig.fields(n_ctx=2048, n_batch=512, n_ubatch=512))
    most = 4 * 512 * (4 * info.n_vocab + 64 * info.n_embd + 8 * info.n_head * 2048) + 2**28
    that(steps.compute_bytes <= most, f"{steps.compute_bytes} bytes planned for 512 tokens")
    _check_planned_steps(rig)
    _check_planned_weights(rig)


def _check_planned_steps(rig: Rig) -> None:
    """Larger steps are planned with more memory, also those beyond the usual ones."""
    steps = [rig.fields(n_ctx=2048, n_batch=n, n_ubatch=n) for n in (16, 512, 2048)]
    sizes = [rig.model.plan_memory(**fields).compute_bytes for fields in steps[:2]]
    with contextlib.suppress(*REFUSED):
        sizes.append(rig.model.plan_memory(**steps[-1]).compute_bytes)
    rises = all(less < more for less, more in itertools.pairwise(sizes))
    that(rises, f"{sizes} bytes are planned for steps of 16, 512 and 2048 tokens")


def _check_planned_weights(rig: Rig) -> None:
    size, plan = rig.model.info.size_bytes, rig.model.plan_memory(**rig.fields())
    weights = plan.weights_bytes
    that(size // 2 <= weights <= 4 * size, f"{weights} bytes of weights, {size} in the files")


def _left_open() -> tuple[int, int]:
    """Return how many files and threads this process has."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _rounds(work: Callable[[], object], n: int) -> Iterator[tuple[int, int]]:
    for _ in range(n):
        work()
        yield _left_open()


@law("MEM-8", tier="process", since="1.2")
def check_files_and_threads_are_given_back(rig: Rig) -> None:
    """Models and contexts opened and closed repeatedly leave no files or threads behind.

    Also where threads and adapters change meanwhile, and where a model cannot be loaded.
    """
    if not Path("/proc/self/task").exists():
        rig.leave("this platform does not tell open files through /proc")
    tokens, fields = rig.tokens(6), _two_threads(rig)
    closed: list[Any] = []  # and still known to somebody, engine and all

    def use_context() -> None:
        context = rig.model.new_context(**fields)
        closed.append((context, engine_of(context)))
        with context:
            context.decode(tokens)
            _change(rig, context, tokens)

    def use_model() -> None:
        with rig.open_model() as model, model.new_context(**rig.fields(n_ctx=32)) as context:
            context.decode(tokens)

    def fail(path: str) -> None:
        with contextlib.suppress(InferCoreError):
            rig.open_at(path).close()

    with tempfile.TemporaryDirectory() as folder:
        if rig.path is not None:
            where = _copy(rig.path, folder)
            file = _largest(where)
            file.chmod(0o600)
            os.truncate(file, file.stat().st_size // 2)
            _check_rounds("damaged models", lambda: fail(str(where)))
    _check_rounds("contexts", use_context)
    _check_rounds("models", use_model)


def _change(rig: Rig, context: Any, tokens: list[int]) -> None:
    """Change adapters and threads, unless another number of threads may be another graph."""
    if rig.observe is None or rig.observe(context, 0).threads is None:
        return
    if context.capabilities.lora and rig.adapter is not None:
        for scale in (1.0, 0.0):
            context.set_adapters(rig.adapters_at(scale))
    if context.capabilities.live_threads:
        for n in (1, 2):
            context.set_threads(n, n)
            context.decode(tokens)


def _check_rounds(what: str, work: Callable[[], object]) -> None:
    counts = list(_rounds(work, 8))
    grown = [after - before for before, after in zip(counts[2], counts[-1], strict=True)]
    that(max(grown) < 4, f"five {what} that were closed left {grown} files and threads")  # noqa: PLR2004


def _two_threads(rig: Rig) -> dict[str, Any]:
    """Return fields that give a context threads to leave behind, where two are honoured."""
    fields = rig.fields(n_ctx=32)
    two = {**fields, "n_threads": 2, "n_threads_batch": 2}
    try:
        rig.model.new_context(**two).close()
    except UnsupportedFeatureError:
        return fields
    return two


# -- ending ----------------------------------------------------------------------------------------


@law("CANCEL-12", since="1.2")
def check_a_callback_is_asked_in_single_tokens(rig: Rig) -> None:
    """An abort callback is asked while single tokens are decoded, as it is in prompts."""
    tokens, asked = rig.tokens(6), []
    context = rig.context()
    context.decode(tokens)

    def stop() -> bool:
        asked.append(1)
        return True

    context.set_abort_callback(stop)
    raises(DecodeAbortedError, lambda: context.decode_one(tokens[0]), "a single token")
    that(asked, "the callback was never asked")
    equal((context.n_past(), context.tokens()), (6, tokens), "what is held")
    context.set_abort_callback(None)
    context.decode_one(tokens[0])
    rig.near(context.logits(), rig.cold([*tokens, tokens[0]]), "after going on")


@law("THREAD-9", tier="process", since="1.2")
def check_closing_from_another_thread(rig: Rig) -> None:
    """A context can be closed by a thread that did not use it; other contexts keep working."""
    tokens = rig.tokens(8)
    context, beside = rig.context(), rig.context()
    for used in (context, beside):
        used.decode(tokens)
    thread = threading.Thread(target=context.close)
    thread.start()
    thread.join(20)
    that(not thread.is_alive() and context.closed, "the context is not closed")
    beside.decode_one(tokens[0])
    rig.near(beside.logits(), rig.cold([*tokens, tokens[0]]), "a context beside it")
