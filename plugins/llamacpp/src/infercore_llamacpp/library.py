"""The one place that imports llama.cpp: bound once, checked, its log captured.

Importing this module raises `BackendUnavailableError` where llama.cpp cannot run here.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from typing import Any

from infercore_llamacpp import log
from infercore_llamacpp.release import DISTRIBUTION, unavailable

# Defaults that the C library fills in. If its structs and the Python declarations disagree (a
# foreign library by LLAMA_CPP_LIB_PATH), the values land in other fields, and this shows.
KNOWN_DEFAULTS = {
    "llama_context_default_params": {
        "n_batch": 2048,
        "n_seq_max": 1,
        "rope_scaling_type": -1,
        "pooling_type": -1,
        "type_k": 1,
        "type_v": 1,
        "embeddings": False,
        "offload_kqv": True,
        "swa_full": True,
        "kv_unified": False,
        "n_samplers": 0,
    },
    "llama_model_default_params": {
        "split_mode": 1,
        "load_mode": -1,
        "main_gpu": 0,
        "vocab_only": False,
        "use_extra_bufts": True,
        "no_alloc": False,
    },
}


def check_layout(binding: Any) -> None:
    """Raise unless the library and its Python declarations agree on the parameter structs."""
    for function, expected in KNOWN_DEFAULTS.items():
        params = getattr(binding, function)()
        for field, value in expected.items():
            found = getattr(params, field, None)
            if found != value:
                raise unavailable(
                    f"the loaded libllama does not match {DISTRIBUTION}'s declarations "
                    f"({field} reads {found!r} instead of {value!r}); unset LLAMA_CPP_LIB_PATH "
                    f"or reinstall {DISTRIBUTION}"
                )


def _import() -> Any:
    # Without this an assertion in llama.cpp starts a debugger for its backtrace.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    try:
        binding = importlib.import_module("llama_cpp.llama_cpp")
    except Exception as error:  # a broken shared library raises many kinds
        raise unavailable(f"{DISTRIBUTION} cannot be imported: {error}") from error
    try:
        check_layout(binding)
    except AttributeError as error:
        raise unavailable(f"the loaded libllama lacks {error}") from error
    return binding


api: Any = _import()

# The engine holds only a pointer to this: it must live as long as the process.
_log_callback = api.llama_log_callback(log.receive)
api.llama_log_set(_log_callback, None)
api.llama_backend_init()


def pointer(address: int) -> Any:
    """Return ``address`` as an argument that ctypes passes on as it is.

    What has a declared type is converted at each call, which takes longer than the call.
    """
    return ctypes.byref(ctypes.c_char.from_address(address))


def bind(name: str, result: Any, *arguments: Any) -> Any:
    """Return a C function of llama.cpp or ggml with a signature of our own.

    Without ``arguments`` it takes a `pointer`, a struct, and numbers of 32 bits.

    Own signatures serve where an address is wanted as a number, and for ggml, whose functions
    must come through libllama: loading libggml by path would make a second instance of it.
    """
    function = api._lib[name]  # noqa: SLF001  (the library has no public name)
    function.restype = result
    function.argtypes = arguments
    return function


def bind_quick(name: str, result: Any, *arguments: Any) -> Any:
    """Return such a function that keeps the interpreter's lock: for one that only looks."""
    return ctypes.PYFUNCTYPE(result, *arguments)((name, api._lib))  # noqa: SLF001  (as above)


def text_of(fill: Any, *arguments: Any) -> str:
    """Return the text that ``fill(*arguments, buffer, size)`` writes.

    Such functions return the full length even when the buffer was too short.
    """
    size = 256
    while True:
        buffer = ctypes.create_string_buffer(size)
        length: int = fill(*arguments, buffer, size)
        if length < size:
            return buffer.raw[:length].decode("utf-8", "replace")
        size = length + 1
