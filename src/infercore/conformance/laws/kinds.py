"""Other kinds of the same: narrower weights, options of an engine's own, devices, long windows."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

import infercore
from infercore.conformance import safetensors_copy
from infercore.conformance.expect import NotApplicable, equal, foreseen, raises, that
from infercore.conformance.law import law
from infercore.conformance.laws.headers import MAX_COPIED, bytes_of
from infercore.conformance.laws.memory import need_proc, own_mib
from infercore.conformance.oracle import Oracle, Way
from infercore.errors import (
    InferCoreError,
    InvalidInputError,
    ModelLoadError,
    ModelNotFoundError,
    OutOfMemoryError,
    PluginError,
    SnapshotError,
    UnsupportedFeatureError,
)
from infercore.registry import default_registry
from infercore.testing import load_reference_model
from infercore.values.config import AdapterSpec, ModelConfig
from infercore.values.info import DEVICE_KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from infercore.conformance.rig import FloatArray, Rig


# -- narrower weights ------------------------------------------------------------------------------


@law("CAP-36", since="1.2")
def check_narrower_weights(rig: Rig) -> None:
    """The same weights in a narrower format give the oracle's logits within twice the tolerance.

    They are as many and smaller; it is another model, and its plan is of these weights. What a
    context adds to them counts as it does with wide ones, or is refused.
    """
    wide, tokens = rig.model, rig.tokens(70)
    with _narrow(rig) as (path, oracle), rig.open_at(path) as model:
        fields = rig.fields(n_batch=32, n_ubatch=32)
        info = model.info
        equal(info.n_params, wide.info.n_params, "n_params")
        that(info.size_bytes < wide.info.size_bytes, f"{info.size_bytes} bytes are not fewer")
        that(model.digest != wide.digest, "the digest is the same")
        expected = oracle.rows(tokens)[-1]
        for cut in (70, 69, 33):
            with model.new_context(**fields) as context:
                context.decode(tokens[:cut])
                for token in tokens[cut:]:
                    context.decode_one(token)
                gap = float(np.abs(context.logits() - expected).max())
                allowed = 2 * context.tolerance  # of the weights too, not of splits alone
                that(gap <= allowed, f"{gap:.3g} off, {context.tolerance:.3g} stated")
                exact = gap == 0
        with model.new_context(n_ctx=rig.n_ctx) as context:  # in the arithmetic of its own choice
            context.decode(tokens)
            gap = float(np.abs(context.logits() - expected).max())
            allowed = 2 * context.tolerance
            that(gap <= allowed, f"{gap:.3g} off, {context.tolerance:.3g} stated by default")
            span = float(np.ptp(expected))
            stated = context.tolerance
            that(stated < span / 4, f"a tolerance of {stated:.3g} where logits span {span:.3g}")
        that(not exact, "the logits of narrower weights are those of the oracle to the bit")
        if rig.context().capabilities.sequence_state:
            with model.new_context(**fields) as context:
                context.decode(tokens)
                data = context.save_sequence(0)
            other = rig.context()
            raises(SnapshotError, lambda: other.load_sequence(0, data), "state of other weights")
        with contextlib.suppress(UnsupportedFeatureError):
            plans = [m.plan_memory(**fields) for m in (wide, model)]
            equal(plans[1].kv_bytes, plans[0].kv_bytes, "the planned cache of both")
            size, planned = info.size_bytes, plans[1].weights_bytes
            that(size <= planned <= 4 * size, f"{planned} bytes of weights planned, of {size}")
            totals = [plan.total_bytes for plan in plans]
            is_less = totals[1] <= 2 * totals[0]  # read as they are, and kept wide
            that(is_less, f"{totals[1]} bytes planned, {totals[0]} of wide weights")
        _check_what_is_added(rig, model, oracle)


def _check_what_is_added(rig: Rig, model: Any, oracle: Oracle) -> None:
    tokens, info = rig.tokens(9), rig.model.info
    vector = np.asarray([rig.random.gauss(0, 0.5) for _ in range(info.n_embd)], np.float32)
    added, rows = {info.n_layer - 1: vector}, oracle.looked_up(tokens)
    ways: dict[str, tuple[Callable[[Any], object], Any]] = {
        "set_control_vector": (
            lambda c: c.set_control_vector(added), oracle.rows(tokens, Way(added=added)),
        ),
        "attention": (
            lambda c: c.set_causal_attention(False), oracle.rows(tokens, Way(causal=False)),
        ),
        "rows": (lambda c: c.decode_spans([(0, rows, "last")]), oracle.rows(tokens)),
    }  # fmt: skip
    if rig.adapter is not None:
        with contextlib.suppress(NotApplicable):  # of others than the pack's there is no oracle
            adapted = rig.adapted(oracle, 1.0).rows(tokens)
            ways["adapters"] = (lambda c: c.set_adapters(rig.adapters_at(1.0)), adapted)
    for name, (give, expected) in ways.items():
        with model.new_context(**rig.fields()) as context:
            try:
                give(context)
            except UnsupportedFeatureError as error:
                that(error.feature, f"the refusal of {name} does not say what is refused")
                equal(error.backend, rig.backend, f"the backend that refuses {name}")
                continue
            if name != "rows":
                context.decode(tokens)
            gap = float(np.abs(context.logits() - expected[-1]).max())
            allowed = 2 * context.tolerance
            that(gap <= allowed, f"{name} on narrower weights: {gap:.3g} off, beyond {allowed:.3g}")


@contextlib.contextmanager
def _narrow(rig: Rig) -> Iterator[tuple[str, Oracle]]:
    """Give where narrower weights lie, and the oracle of them: the rig's, or a copy in bfloat16."""
    oracle = rig.need_oracle()
    if rig.narrow is not None and not callable(rig.narrow):
        yield str(rig.narrow), oracle
        return
    with tempfile.TemporaryDirectory() as scratch:
        copy, plain = Path(scratch) / "narrow", Path(scratch) / "oracle"
        if rig.narrow is not None:
            became = rig.narrow(str(copy))
            shutil.copytree(str(rig.oracle_path()), plain)
            _rewrite(plain / WEIGHTS, "F32", lambda weights: became(weights).tobytes())
        elif rig.path is not None and (Path(rig.path) / WEIGHTS).is_file():
            shutil.copytree(rig.path, copy)
            _rewrite(copy / WEIGHTS, "BF16", _halved)
            plain = copy
        else:
            rig.leave("the rig names no file with narrower weights")
        yield str(copy), Oracle.of_folder(str(plain)) or oracle


WEIGHTS = "model.safetensors"


def _halved(weights: FloatArray) -> bytes:
    return (weights.view("<u4") >> 16).astype("<u2").tobytes()


def _rewrite(file: Path, kind: str, convert: Callable[[FloatArray], bytes]) -> None:
    """Write the float32 numbers of a safetensors file in another way, as ``kind``."""
    tensors = safetensors_copy.read(file)
    for name, tensor in tensors.items():
        if tensor.kind == "F32":
            tensors[name] = attrs.evolve(tensor, kind=kind, data=convert(tensor.numbers))
    safetensors_copy.write(file, tensors)


# -- an engine's own options, and devices ----------------------------------------------------------

_ODD: tuple[Any, ...] = (-1, 2**70, 0.5, "", [], {"a": object()}, {1: 2}, True)


@law("BAD-19", since="1.2")
def check_odd_values_of_own_options(rig: Rig) -> None:
    """Each engine option takes a value or refuses it by name, never with an accidental error.

    Where a refusal says that a list of values, "one of 'a', 'b'", "True or False" or "an integer
    from 1 to 4" is allowed, these are taken, and integers just beyond are not. Options of the rig
    (`Rig.own_options`, `Rig.wrong_options`) do what it says, or are refused.
    """
    found = _announced(rig)
    if found is None and rig.backend != "reference":
        rig.leave("the backend is not announced, so users cannot load with it by name")
    with tempfile.TemporaryDirectory() as folder:  # where the option is a folder, it may be made
        odd = (*_ODD, str(Path(folder) / "no such value"))
        for name in found.model_options if found else ():
            for value in odd:
                _odd(name, value, lambda options: _load(rig, backend_options=options).close())
        for name in found.context_options if found else ():
            said = [_odd(name, value, lambda options: _open(rig, options)) for value in odd]
            for allowed in {repr(each): each for each in said}.values():
                _check_allowed(rig, name, allowed)
    raises(InvalidInputError, lambda: _load(rig, backend_options={"no_such": 1}), "no such option")
    of_models = set(found.model_options) if found else set()
    of_contexts = set(found.context_options) if found else set()
    for options, shows in rig.own_options:
        if set(options) <= of_contexts:
            with rig.model.new_context(n_ctx=32, backend_options=options) as context:
                that(shows(context), f"{options} does not show in the context")
                with contextlib.suppress(UnsupportedFeatureError, InvalidInputError):
                    context.set_threads(context.n_threads, context.n_threads_batch)
                that(shows(context), f"{options} does not show after threads were set again")
            continue
        own = {name: value for name, value in options.items() if name in of_models}
        fields = {name: value for name, value in options.items() if name not in own}
        with _load(rig, backend_options=own, **fields) as model:
            that(shows(model), f"{options} does not show in the model")
            if found is not None:
                _check_plan(rig, model, {"backend_options": own, **fields})
    _check_wrong_options(rig, of_contexts)


def _announced(rig: Rig) -> Any:
    """Return the descriptor of the rig's backend, None where none is announced."""
    known = [record.name for record in default_registry().records()]
    return default_registry().get(rig.backend) if rig.backend in known else None


@law("CAP-48", since="1.2")
def check_own_options_beside_others(rig: Rig) -> None:
    """An engine-specific context option affects only the context that set it.

    Whichever is opened first, with whatever threads (`Rig.own_options`).
    """
    found = _announced(rig)
    of_contexts = set(found.context_options) if found else set()
    brought = [(own, shows) for own, shows in rig.own_options if own and set(own) <= of_contexts]
    if not brought:
        rig.leave("the rig brings no options of contexts")
    n_tried = 0
    for (own, shows), n in itertools.product(brought, (1, 2)):
        plain: dict[str, Any] = {}
        fields = {"n_threads": n, "n_threads_batch": n, "backend_options": own}
        try:
            told = [_told(rig, shows, each) for each in (plain, fields)]
        except UnsupportedFeatureError:  # of two threads, or of what it is tried with
            continue
        n_tried += 1
        for order in ((plain, fields), (fields, plain)):
            with contextlib.ExitStack() as opened:
                contexts = [opened.enter_context(_with_one_thread(rig, each)) for each in order]
                of_both = contexts if order[0] is plain else contexts[::-1]
                together = [(dict(each.effective), shows(each)) for each in of_both]
                equal(together, told, f"what is told of a context with none, and with {own}")
    if not n_tried:
        rig.leave("no option of the rig's can be set here")


def _told(rig: Rig, shows: Callable[[Any], bool], fields: Mapping[str, Any]) -> tuple[Any, bool]:
    with _with_one_thread(rig, fields) as context:
        n = fields.get("n_threads", 1)
        equal((context.n_threads, context.n_threads_batch), (n, n), f"threads with {fields}")
        return dict(context.effective), shows(context)


def _with_one_thread(rig: Rig, fields: Mapping[str, Any]) -> Any:
    """Open a context of one thread, or with the ``fields``."""
    return rig.model.new_context(**{"n_ctx": 32, "n_threads": 1, "n_threads_batch": 1, **fields})


def _check_wrong_options(rig: Rig, of_contexts: set[str]) -> None:
    for options in rig.wrong_options:
        own = {name: value for name, value in options.items() if name in of_contexts}
        fields = {name: value for name, value in options.items() if name not in own}
        opened = partial(_open, rig, own, **fields) if own else partial(_load_with, rig, options)
        _check_refused(options, opened)
        right = {n: value for each, _ in rig.own_options[:1] for n, value in each.items()}
        if own and not set(right) & set(own) and set(right) <= of_contexts:
            _check_refused(options, partial(_open, rig, {**right, **own}, **fields))


def _check_plan(rig: Rig, model: Any, fields: Mapping[str, Any]) -> None:
    """By its path alone a model is planned as it is where it was loaded with these ``fields``."""
    by_path = partial(
        infercore.plan_memory, str(rig.path), backend=rig.backend, check_in_child=False, **fields
    )
    for n_ctx in (0, 64):
        with contextlib.suppress(UnsupportedFeatureError):
            plans = [planned(n_ctx=n_ctx) for planned in (model.plan_memory, by_path)]
            told = [(each.n_ctx, each.kv_bytes) for each in plans]
            equal(told[1], told[0], f"window and cache with {fields}, planned by the path alone")


def _load_with(rig: Rig, options: Mapping[str, Any]) -> None:
    _load(rig, backend_options=options).close()


def _check_refused(options: Any, load: Callable[[], object]) -> None:
    name = next(iter(options))
    error = raises(InferCoreError, load, f"a model or context with {options}")
    is_refusal = isinstance(error, (InvalidInputError, UnsupportedFeatureError))
    that(is_refusal, f"{options} raised {type(error).__name__}: {error}")
    that(name in str(error), f"the refusal of {options} does not name it: {error}")
    if isinstance(error, InvalidInputError):
        equal(error.field, name, f"the field in the refusal of {options}")
        that(error.allowed not in (None, ""), f"the refusal of {options} says not what is allowed")
        value = options[name]
        part = value if not isinstance(value, dict) else (*value, *value.values())
        is_there = error.value == value or (isinstance(part, tuple) and error.value in part)
        that(is_there, f"the refusal of {options} is of {error.value!r}")


def _open(rig: Rig, options: Mapping[str, Any], **fields: Any) -> None:
    own = dict(rig.exact.get("backend_options") or {})
    rig.model.new_context(n_ctx=32, backend_options={**own, **options}, **fields).close()


_ONE_OF = re.compile(r"one of '[^']*'(, '[^']*')*")
_RANGE = re.compile(r"an integer from (-?\d+) to (-?\d+)")


def _check_allowed(rig: Rig, name: str, allowed: object) -> None:
    """Try the values, the names, the truths or the ends of a range that a refusal allows."""
    text = allowed if isinstance(allowed, str) else ""
    values: list[Any] = list(allowed) if isinstance(allowed, (list, tuple)) else []
    if _ONE_OF.fullmatch(text):
        values = re.findall(r"'([^']*)'", text)
    elif text == "True or False":
        values = [True, False]
    elif found := _RANGE.fullmatch(text):
        low, high = map(int, found.groups())
        values = [low, high]
        for beyond in (low - 1, high + 1):
            _check_refused({name: beyond}, partial(_open, rig, {name: beyond}))
    for value in values:
        try:
            _check_taken(rig, name, value, partial(_open, rig))
        except InvalidInputError as error:
            that(condition=False, text=f"{name}={value!r} is said to be allowed: {error}")
        if rig.encoder is not None:
            opened = partial(_open_encoder, rig)
            with contextlib.suppress(InvalidInputError):  # the refusal was not an encoder's
                _check_taken(rig, name, value, opened)


def _open_encoder(rig: Rig, options: Mapping[str, Any]) -> None:
    rig.encoder_model.new_context(n_ctx=32, backend_options=options).close()


def _check_taken(
    rig: Rig, name: str, value: Any, opened: Callable[[Mapping[str, Any]], object]
) -> None:
    try:
        opened({name: value})
    except OutOfMemoryError:
        return
    except UnsupportedFeatureError as error:
        that(name in error.feature, f"{name}={value!r} is refused as {error.feature!r}")
        equal(error.backend, rig.backend, f"the backend that refuses {name}={value!r}")
        that(error.hint, f"the refusal of {name}={value!r} says nothing to do: {error}")


def _odd(name: str, value: Any, opened: Any) -> object:
    """Return what the refusal says is allowed, None where there is no such refusal."""
    try:
        opened({name: value})
    except PluginError as error:
        that(condition=False, text=f"{name}={value!r}: {error}")
    except InvalidInputError as error:
        named = name in str(error)
        that(named and error.allowed, f"{name}={value!r}: the refusal says {error}")
        return error.allowed
    except UnsupportedFeatureError as error:
        that(name in error.feature, f"{name}={value!r} is refused as {error.feature!r}")
    except InferCoreError as error:
        foreseen(error, f"{name}={value!r}")
    return None


def _load(rig: Rig, **fields: Any) -> Any:
    if rig.path is None:
        rig.leave("the rig names no path")
    return _load_at(rig, rig.path, **fields)


def _load_at(rig: Rig, path: str, **fields: Any) -> Any:
    if rig.backend == "reference":
        return load_reference_model(path, config=ModelConfig(**fields))
    return infercore.load_model(path, backend=rig.backend, check_in_child=False, **fields)


_OF_GPUS = (
    "nvidia*", "dri/render*", "kfd", "accel/*", "dxg", "mali*", "kgsl*", "nvhost*", "nvmap", "hl*",
)  # fmt: skip


@law("CAP-37", model="any", since="1.2")
def check_devices(rig: Rig) -> None:
    """Devices have names and kinds; a GPU is listed only where there may be one.

    Any kind may be the only one. Layers are offloaded only where something other than a processor
    is announced.
    """
    found = [b for b in infercore.backends(devices=True) if b.name == rig.backend]
    devices = found[0].devices if found else ()
    names = [device.name for device in devices]
    equal(len(set(names)), len(names), "names of devices")
    gpus = [device.name for device in devices if device.kind in ("gpu", "igpu")]
    dev = Path("/dev")
    if dev.is_dir() and Path("/proc/self").exists() and not any(map(_any_in(dev), _OF_GPUS)):
        equal(gpus, [], "GPUs on a machine that has none")
    records = {record.name: record.descriptor for record in default_registry().records()}
    announces = getattr(records.get(rig.backend), "devices", None) is not None
    that(devices or not announces, "there is no device, not even a processor")
    if devices:  # a backend may announce none
        takers = [device.name for device in devices if device.kind != "cpu"]
        offloads = rig.model.capabilities.gpu_offload and not takers
        equal(offloads, False, "layers go to no device but a processor")
        for device in devices:
            is_known = device.kind in DEVICE_KINDS and (
                device.kind == "cpu" or device.name != "CPU"
            )
            that(is_known, f"{device.name} is of the kind {device.kind!r}")
            sizes = (device.memory_free_bytes or 0, device.memory_total_bytes or 2**60)
            that(0 <= sizes[0] <= sizes[1], f"{device.name} has {sizes} bytes")
            if device.kind == "cpu" and device.memory_total_bytes and Path("/proc/self").exists():
                machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
                fits = own_mib() * 2**20 <= device.memory_total_bytes <= 2 * machine
                that(fits, f"{device.name} has {sizes[1]} bytes in all, the machine {machine}")
            that(device.description, f"{device.name} is not described")


def _any_in(folder: Path) -> Any:
    return lambda pattern: any(folder.glob(pattern))


# -- windows and plans -----------------------------------------------------------------------------


@law("ENC-11", needs="encoder", model="encoder", since="1.2")
def check_windows_of_learned_positions(rig: Rig) -> None:
    """An encoder takes as many tokens as it was trained on; it refuses more, or encodes them."""
    trained = rig.encoder_model.info.n_ctx_train
    if not 0 < trained <= 2**12:
        rig.leave("the encoder's positions are not known, or too many to be filled here")
    ids = list(rig.encoder_model.tokenizer.encode(rig.story))
    ids = (ids * (trained // len(ids) + 1))[: trained + 1]
    _fill(rig, ids[:trained])
    try:
        _fill(rig, ids)  # positions that are computed, not learned, have no end
    except InvalidInputError as error:
        found = error.field, error.value, error.allowed is not None
        equal(found, ("n_ctx", len(ids), True), "field, value and what is allowed")
    except UnsupportedFeatureError as error:
        that("n_ctx" in error.feature, f"a window that is too long is refused as {error.feature!r}")


def _fill(rig: Rig, ids: list[int]) -> None:
    n = len(ids)
    context = rig.opened(rig.encoder_context(n_ctx=n, n_batch=n, pooling_type="mean"))
    context.encode(ids)
    that(np.isfinite(context.embedding()).all(), f"the vector of {n} tokens, a full window")


N_PLANS = 24
PLAN_MIB = 8


@law("MEM-9", tier="process", needs="plan_memory", since="1.2")
def check_plans_leave_nothing(rig: Rig) -> None:
    """Planning leaks no memory, for a loaded model or for one that is not loaded.

    Both plan the same window and the same cache for it, and refuse adapters where there are none.
    Where a loaded model's files are gone, they are planned all the same, or said to be missing.
    """
    need_proc(rig)
    announced = rig.backend in {backend.name for backend in infercore.backends()}
    by_path = partial(infercore.plan_memory, str(rig.path), backend=rig.backend)
    is_found = announced and rig.backend != "reference" and rig.path is not None
    for n_ctx in (None, 0, 100) if is_found else ():
        plans = [made(**rig.fields(n_ctx=n_ctx)) for made in (rig.model.plan_memory, by_path)]
        found = [(each.n_ctx, each.kv_bytes) for each in plans]
        equal(found[1], found[0], f"window and cache for n_ctx={n_ctx}, planned by the path alone")
    if is_found:
        _check_no_adapters(rig)

    def plan() -> None:
        rig.model.plan_memory(**rig.fields(n_ctx=512))
        if is_found:
            by_path(n_ctx=512)

    for _ in range(6):
        plan()
    before = own_mib()
    for _ in range(N_PLANS):
        plan()
    left = own_mib() - before
    that(left < PLAN_MIB, f"{N_PLANS} plans left {left:.1f} MiB")
    has_path = is_found or (rig.backend == "reference" and rig.path is not None)
    if has_path and bytes_of(Path(str(rig.path))) <= MAX_COPIED:
        _check_plan_of_what_is_gone(rig)


def _check_plan_of_what_is_gone(rig: Rig) -> None:
    path = Path(str(rig.path))
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        shutil.copytree(path, copy) if path.is_dir() else shutil.copy(path, copy)
        with _load_at(rig, str(copy)) as model:
            shutil.rmtree(copy) if path.is_dir() else copy.unlink()
            try:
                model.plan_memory(**rig.fields(n_ctx=512))
            except ModelLoadError as error:
                is_said = isinstance(error, ModelNotFoundError) and str(copy) in str(error.path)
                wanted = f"a plan, or ModelNotFoundError with the path {copy}"
                that(is_said, f"of a model whose files went, {wanted} is expected, not {error!r}")


def _check_no_adapters(rig: Rig) -> None:
    models = [(rig.path, rig.model)]
    models += [(rig.encoder, rig.encoder_model)] if rig.encoder is not None else []
    asked = [AdapterSpec(path="/no/such/adapter")]
    for path, model in models:
        if not model.capabilities.lora:
            planned = partial(
                infercore.plan_memory, str(path), backend=rig.backend, check_in_child=False
            )
            what = f"a plan with an adapter, of {Path(str(path)).name}"
            error = raises(UnsupportedFeatureError, lambda p=planned: p(adapters=asked), what)
            that("adapters" in error.feature, f"{what}: it is refused as {error.feature!r}")
