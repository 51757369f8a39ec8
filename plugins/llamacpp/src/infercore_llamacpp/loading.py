"""From a `ModelConfig` to loaded weights: every field is honoured or refused."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import attrs

from infercore import (
    InvalidInputError,
    ModelFormatError,
    ModelLoadError,
    OutOfMemoryError,
    free_bytes,
)
from infercore_llamacpp import amx, gguf, layout, log
from infercore_llamacpp.devices import list_devices
from infercore_llamacpp.library import api
from infercore_llamacpp.overrides import to_overrides
from infercore_llamacpp.settings import refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infercore import ModelConfig
    from infercore_llamacpp.devices import Device

_SPLIT_MODES = ("none", "layer", "row")  # by their number in llama.h
_REPACKED = re.compile(r"(?:AMX|REPACK) model buffer size")
_OUT_OF_MEMORY = ("bad_alloc", "unable to allocate", "failed to allocate", "out of memory")
_BESIDE = 48 * 2**20  # bytes that loading takes beside the weights


@dataclass
class Loaded:
    """Weights in memory: the engine's handle, and where they are.

    ``n_copied`` bytes of matrices are copied into a layout that suits this CPU.
    """

    handle: int
    device: str
    n_gpu_layers: int
    has_gpu: bool
    n_copied: int


def load(
    path: str, config: ModelConfig, *, allocate: bool = True, is_checked: bool = False
) -> Loaded:
    """Load the model at ``path``; without ``allocate`` only its shape, for `plan`.

    ``is_checked``: `gguf.check_file` has passed.
    Raises `ModelNotFoundError`, `ModelFormatError`, `OutOfMemoryError`; `ModelLoadError` when
    ``progress`` cancelled; `UnsupportedFeatureError` and `InvalidInputError` for the config.
    """
    if not is_checked:
        gguf.check_file(path)
    _check_room(path, config, allocate=allocate)
    devices = list_devices()
    has_gpu = any(device.is_gpu for device in devices) and not _is_cpu(config.device)
    params = api.llama_model_default_params()
    laid_out = None
    if config.backend_options.get("use_extra_bufts") is None:
        laid_out = layout.choose(params, path, has_gpu=has_gpu)
    keep_alive = [_place(params, config, devices), _options(params, config)]
    params.load_mode = _load_mode(config) if allocate else api.LLAMA_LOAD_MODE_NONE
    params.no_alloc = not allocate
    params.check_tensors = allocate and config.check_tensors is True
    progress = _Progress(config.progress)
    params.progress_callback = progress.callback
    with log.listening() as lines:
        handle = api.llama_model_load_from_file(os.fsencode(path), params)
        del keep_alive
        log.raise_kept(lambda: api.llama_model_free(handle))
        if progress.error is not None:
            api.llama_model_free(handle)
            raise progress.error
        if not handle:
            raise log.explain(_failure(path, lines, cancelled=progress.cancelled))
        _check_honoured(handle, config, lines)
    n_gpu_layers = params.n_gpu_layers if has_gpu else 0
    device = config.device or ("GPU" if has_gpu else "CPU")
    n_copied = 0
    if laid_out is not None:
        n_copied = laid_out.n_bytes
    elif any(_REPACKED.search(line) for line in lines):
        n_copied = matrix_bytes(path)
    return Loaded(handle, device, n_gpu_layers, has_gpu, n_copied)


def _check_room(path: str, config: ModelConfig, *, allocate: bool) -> None:
    """Raise `OutOfMemoryError` where limits leave no room for the files, or for copies of them."""
    mapped = gguf.parts(path) if allocate and config.use_mmap is not False else ()
    check_addresses(mapped)
    try:
        n_most = 2 * sum(map(os.path.getsize, gguf.parts(path)))
    except OSError:
        return  # a file is gone, as who reads it says
    if not allocate or free_bytes() >= n_most + 2 * _BESIDE:
        return
    shape = load(path, attrs.evolve(config, progress=None), allocate=False, is_checked=True)
    api.llama_model_free(shape.handle)
    if shape.n_copied:
        check_addresses(mapped, shape.n_copied)


def matrix_bytes(path: str) -> int:
    """Return the bytes of weights that are multiplied with, and so may be copied."""
    tensors = gguf.tensors(path)
    is_tied = all(each.name != "output.weight" for each in tensors)  # the table makes logits too
    return sum(
        layout.n_bytes(each)
        for each in tensors
        if len(each.dims) > 1 and (is_tied or not each.name.startswith("token_embd"))
    )


def check_addresses(files: Sequence[str], n_bytes: int = 0) -> None:
    """Raise `OutOfMemoryError` where limits of the process leave no room to map ``files``.

    And for ``n_bytes`` and a little beside: the engine ends the process where it lacks that.
    """
    copies = f", {n_bytes >> 20} MiB of it for weights in another layout" if n_bytes else ""
    n_bytes += _BESIDE
    try:
        with contextlib.ExitStack() as stack:
            for file in files:
                opened = stack.enter_context(open(file, "rb"))
                stack.enter_context(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
            stack.enter_context(mmap.mmap(-1, n_bytes, access=mmap.ACCESS_COPY))
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) != errno.ENOMEM:
            return  # what else is wrong with a file is said by who reads it
        raise OutOfMemoryError(
            "the system or the limits of this process (ulimit -v, -d) leave no room for "
            f"{''.join(f'{file} and ' for file in files)}{n_bytes >> 20} MiB of work{copies}: "
            f"{error}"
        ) from error


class _Progress:
    """The user's callback, as the engine may call it: what it raises waits until afterwards."""

    def __init__(self, report: Callable[[float], object] | None) -> None:
        self._report = report
        self.error: BaseException | None = None
        self.cancelled = False
        self.callback = api.llama_progress_callback(self._call)

    def _call(self, fraction: float, _data: object) -> bool:
        try:
            self.cancelled = self._report is not None and self._report(fraction) is False
        except BaseException as error:  # noqa: BLE001  (cannot pass through the engine)
            self.error = error
        return not self.cancelled and self.error is None


def _failure(path: str, lines: Sequence[str], *, cancelled: bool) -> Exception:
    if cancelled:
        return ModelLoadError(f"the progress callback cancelled loading {path}", path=path)
    if any(sign in line.lower() for line in lines for sign in _OUT_OF_MEMORY):
        return OutOfMemoryError(f"no memory for the weights of {path}; use a smaller quantisation")
    said = log.last_complaint_but("failed to load model")
    return ModelFormatError(
        f"llama.cpp cannot load {path}: {said or 'it gave no reason'}", path=path
    )


def _check_honoured(handle: int, config: ModelConfig, lines: Sequence[str]) -> None:
    """Refuse a model that loaded without what was asked for."""
    if config.use_mlock and any("mlock" in line and "fail" in line for line in lines):
        api.llama_model_free(handle)
        raise log.explain(
            refuse("use_mlock=True", "the system refused to lock memory; raise 'ulimit -l'")
        )
    for key in config.backend_options.get("kv_overrides") or {}:
        if not any("override" in line and f"'{key}'" in line for line in lines):
            api.llama_model_free(handle)
            raise InvalidInputError(
                f"kv_overrides has {key!r}, which this model does not read",
                field="kv_overrides",
                value=key,
                allowed="keys of this model's metadata",
            )


def _load_mode(config: ModelConfig) -> int:
    maps = config.use_mmap is not False
    if config.use_mlock:
        return int(api.LLAMA_LOAD_MODE_MMAP_MLOCK if maps else api.LLAMA_LOAD_MODE_MLOCK)
    if config.use_mmap is None:
        return int(api.LLAMA_LOAD_MODE_AUTO)
    return int(api.LLAMA_LOAD_MODE_MMAP if maps else api.LLAMA_LOAD_MODE_NONE)


# -- devices -----------------------------------------------------------------------------------


def _is_cpu(device: str | None) -> bool:
    return device is not None and device.lower() == "cpu"


def _place(params: Any, config: ModelConfig, devices: Sequence[Device]) -> object:
    """Write where the weights go; returns what must live until they are loaded."""
    gpus = [device for device in devices if device.is_gpu]
    chosen, handles = _choose(config.device, gpus)
    params.devices = ctypes.cast(handles, ctypes.c_void_p)
    if not chosen:
        _check_no_gpu_fields(config)
        return handles
    if config.n_gpu_layers is not None:
        params.n_gpu_layers = config.n_gpu_layers
    if config.split_mode is not None:
        params.split_mode = _SPLIT_MODES.index(config.split_mode)
    if config.main_gpu is not None:
        if config.main_gpu >= len(chosen):
            raise _not_there("main_gpu", config.main_gpu, f"0 to {len(chosen) - 1}")
        params.main_gpu = config.main_gpu
    return handles, _split(params, config, len(chosen))


def _choose(name: str | None, gpus: Sequence[Device]) -> tuple[Sequence[Device], Any]:
    if name is None:
        return gpus, None
    chosen = [gpu for gpu in gpus if gpu.info.name.lower() == name.lower()]
    if not chosen and not _is_cpu(name):
        known = ["CPU", *(gpu.info.name for gpu in gpus)]
        raise _not_there("device", name, f"one of {', '.join(known)}")
    handles = (ctypes.c_void_p * 2)(*(gpu.handle for gpu in chosen))  # ends with NULL
    return chosen, handles


def _check_no_gpu_fields(config: ModelConfig) -> None:
    """Without a GPU: "all layers" (-1) are none, and only what asks for no GPU is honoured."""
    harmless = {"n_gpu_layers": (-1, 0), "split_mode": ("none",), "main_gpu": (0,)}
    for field in ("n_gpu_layers", "split_mode", "main_gpu", "tensor_split"):
        value = getattr(config, field)
        if value is not None and value not in harmless.get(field, ()):
            raise refuse(f"{field}={value!r}", "llama.cpp has no GPU to use here")


def _split(params: Any, config: ModelConfig, n_devices: int) -> object:
    if config.tensor_split is None:
        return None
    if len(config.tensor_split) > n_devices or not any(config.tensor_split):
        raise _not_there("tensor_split", config.tensor_split, f"1 to {n_devices} shares")
    shares = (ctypes.c_float * api.llama_max_devices())(*config.tensor_split)
    params.tensor_split = ctypes.cast(shares, ctypes.POINTER(ctypes.c_float))
    return shares


def _not_there(field: str, value: object, allowed: str) -> InvalidInputError:
    return InvalidInputError(
        f"{field}={value!r} is not allowed; give {allowed}",
        field=field,
        value=value,
        allowed=allowed,
    )


# -- options of this engine --------------------------------------------------------------------


def _options(params: Any, config: ModelConfig) -> object:
    options = config.backend_options
    for name in ("use_extra_bufts", "no_host"):
        value = options.get(name)
        if value is not None:
            if not isinstance(value, bool):
                raise _not_there(name, value, "True or False")
            setattr(params, name, value)
    if options.get("use_extra_bufts") and not amx.is_sound():
        raise refuse("use_extra_bufts=True", "this build dies in its AMX kernels")
    return to_overrides(params, options.get("kv_overrides"))
