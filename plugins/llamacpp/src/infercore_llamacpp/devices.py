"""The compute devices that this build of llama.cpp sees."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from infercore import DeviceInfo
from infercore_llamacpp.library import bind

_KINDS = dict(enumerate(("cpu", "gpu", "igpu")))  # any other is "accel"
_GPU_KINDS = ("gpu", "igpu")

_count = bind("ggml_backend_dev_count", ctypes.c_size_t)
_get = bind("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
_name = bind("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)
_description = bind("ggml_backend_dev_description", ctypes.c_char_p, ctypes.c_void_p)
_type = bind("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
_memory = bind(
    "ggml_backend_dev_memory",
    None,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.POINTER(ctypes.c_size_t),
)


@dataclass(frozen=True)
class Device:
    """A device: its description, and the engine's handle."""

    info: DeviceInfo
    handle: int

    @property
    def is_gpu(self) -> bool:
        """Whether layers can be offloaded to it."""
        return self.info.kind in _GPU_KINDS


def list_devices() -> list[Device]:
    """Return all devices, in the engine's order."""
    return [_describe(_get(i)) for i in range(_count())]


def _describe(handle: int) -> Device:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _memory(handle, ctypes.byref(free), ctypes.byref(total))
    info = DeviceInfo(
        name=_name(handle).decode(),
        kind=_KINDS.get(_type(handle), "accel"),
        description=_description(handle).decode("utf-8", "replace"),
        memory_total_bytes=total.value or None,
        memory_free_bytes=free.value or None,
    )
    return Device(info, handle)
