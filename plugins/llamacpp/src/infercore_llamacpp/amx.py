"""Whether the matrix unit of the CPU (Intel's AMX) can be trusted in this build of llama.cpp.

Some compilers (GCC 12.2 is one) take the stores to the unit's configuration for dead and leave
them out. What they build dies at the first product with quantised weights, on a CPU that has the
unit. So the first load on such a CPU tries a tiny model in a child process, and the verdict on
the library is kept. Where the child dies, weights get no layout that needs AMX (`layout`); nor do
they where nothing could be tried, but that is no verdict.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from infercore_llamacpp import child, log
from infercore_llamacpp.library import api

SECONDS = 120
_DEATHS = {
    -number
    for name in ("SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE")
    if (number := getattr(signal, name, 0))
}
_CPU = Path("/proc/cpuinfo")
_UNIT = "amx_int8"
_SIZE = 64  # every dimension of the tiny model, and its vocabulary
_BLOCK, _BLOCK_BYTES = 32, 34
_F32, _Q8_0 = 0, 8
_UINT32, _FLOAT32, _STRING = 4, 6, 8
_ALIGNMENT = 32


@cache
def is_sound() -> bool:
    """Return whether quantised weights may take the layout that AMX reads."""
    if not _in_use():
        return True
    library = _library()
    verdict = _recall(library)
    if verdict is None:
        verdict = _try()
        if verdict is not None:
            _keep(library, sound=verdict)
    if verdict is None:
        log.LOGGER.warning("llama.cpp's AMX kernels could not be tried, so they are left out")
    elif not verdict:
        log.LOGGER.warning(
            "this build of llama.cpp dies in its AMX kernels, so they are left out; build "
            "llama-cpp-python with a newer compiler to have them"
        )
    return verdict is True


def _in_use() -> bool:
    """Return whether both this CPU and this build have AMX."""
    try:
        return _UNIT in _CPU.read_text() and b"AMX_INT8 = 1" in api.llama_print_system_info()
    except OSError:
        return False


def _try() -> bool | None:
    """Decode with a tiny quantised model in a child process; return whether that lived.

    None where it ended for another reason, or never began.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "tiny.gguf")
            write_model(path)
            code = child.run(__name__, path, seconds=SECONDS).returncode
    except (OSError, subprocess.TimeoutExpired):
        return None
    return {0: True, **dict.fromkeys(_DEATHS, False)}.get(code)


# -- the verdict, kept between runs ------------------------------------------------------------


def _library() -> str:
    """Return what distinguishes this build from another one: its files, their sizes and times."""
    folder = Path(os.environ.get("LLAMA_CPP_LIB_PATH") or Path(api.__file__).parent / "lib")
    found = (path.stat() for path in sorted(folder.glob("*ggml-cpu*")))
    return f"{folder}|" + "|".join(f"{stat.st_size},{stat.st_mtime_ns}" for stat in found)


def _cache_file() -> Path | None:
    folder = os.environ.get("INFERCORE_CACHE_DIR")
    if folder:
        return None if folder == "none" else Path(folder) / "llamacpp-amx.json"
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "infercore" / "llamacpp-amx.json" if os.path.isabs(root) else None


def _read(path: Path) -> dict[str, object]:
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _recall(library: str) -> bool | None:
    path = _cache_file()
    verdict = None if path is None else _read(path).get(library)
    return verdict if isinstance(verdict, bool) else None


def _keep(library: str, *, sound: bool) -> None:
    """Write the verdict down; where that cannot be, the next process tries again."""
    path = _cache_file()
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w") as file:
            json.dump({**_read(path), library: sound}, file)
        Path(name).replace(path)
    except OSError:
        return


# -- the tiny model ----------------------------------------------------------------------------


def write_model(path: str) -> None:
    """Write a llama of one layer whose weights are zeros in Q8_0, with no vocabulary."""
    numbers = {
        "vocab_size": _SIZE,
        "context_length": _SIZE,
        "embedding_length": _SIZE,
        "block_count": 1,
        "feed_forward_length": _SIZE,
        "attention.head_count": 2,
        "attention.head_count_kv": 2,
        "rope.dimension_count": _SIZE // 2,
    }
    texts = {"general.architecture": "llama", "tokenizer.ggml.model": "none"}
    entries = [_text(key) + struct.pack("<I", _STRING) + _text(v) for key, v in texts.items()]
    entries += [
        _text(f"llama.{key}") + struct.pack("<II", _UINT32, v) for key, v in numbers.items()
    ]
    epsilon = _text("llama.attention.layer_norm_rms_epsilon")
    entries.append(epsilon + struct.pack("<If", _FLOAT32, 1e-5))
    tensors, n_bytes = _tensors()
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(entries))
    start = head + b"".join(entries) + b"".join(tensors)
    Path(path).write_bytes(start.ljust(_padded(len(start)), b"\0") + bytes(n_bytes))


def _tensors() -> tuple[list[bytes], int]:
    """Return the descriptions of the tensors, and how many bytes they take."""
    weights = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    square = ["token_embd", "output", *(f"blk.0.{name}" for name in weights)]
    norms = ["output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"]
    found, offset = [], 0
    for name in (*square, *norms):
        dims, kind = ((_SIZE,), _F32) if name in norms else ((_SIZE, _SIZE), _Q8_0)
        shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        found.append(_text(f"{name}.weight") + shape + struct.pack("<IQ", kind, offset))
        size = 4 * _SIZE if kind == _F32 else _SIZE * _SIZE // _BLOCK * _BLOCK_BYTES
        offset += _padded(size)
    return found, offset


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def main(path: str) -> None:
    """Load ``path`` with every layout there is, and decode single tokens and a batch."""
    params = api.llama_model_default_params()
    params.n_gpu_layers = 0
    model = api.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        sys.exit(1)
    sizes = api.llama_context_default_params()
    sizes.n_ctx = sizes.n_batch = sizes.n_ubatch = _SIZE
    sizes.n_threads = sizes.n_threads_batch = 1
    context = api.llama_init_from_model(model, sizes)
    if not context:
        sys.exit(1)
    for n_tokens in (1, _SIZE // 2):
        tokens = (api.llama_token * n_tokens)()
        if api.llama_decode(context, api.llama_batch_get_one(tokens, n_tokens)) != 0:
            sys.exit(1)
    api.llama_free(context)
    api.llama_model_free(model)


if __name__ == "__main__":
    main(sys.argv[1])
