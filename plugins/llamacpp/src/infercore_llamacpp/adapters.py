"""LoRA adapters: loaded once for a model, which frees them, and applied to its contexts."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import TYPE_CHECKING, Any

from infercore import ModelFormatError, ModelNotFoundError
from infercore_llamacpp import log, soundness
from infercore_llamacpp.library import api
from infercore_llamacpp.loading import check_addresses
from infercore_llamacpp.settings import refuse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infercore import AdapterSpec


class Adapters:
    """The adapters that were loaded for one model."""

    def __init__(self, model: int) -> None:
        self._model = model
        self._loaded: dict[tuple[str, int, int], Any] = {}
        self._lock = threading.Lock()

    def apply(self, context: int, adapters: Sequence[AdapterSpec]) -> None:
        """Replace the list of ``context`` by ``adapters``; unchanged where one cannot be loaded."""
        loaded = [(self._load(adapter.path), adapter.scale) for adapter in adapters]
        handles = {id(handle): handle for handle, _ in loaded}
        scales = dict.fromkeys(handles, 0.0)
        for handle, scale in loaded:  # the engine counts an adapter once, so its scales add up
            scales[id(handle)] += scale
        n = len(handles)
        # One call with the whole list: each call replaces what the one before had set.
        api.llama_set_adapters_lora(
            context,
            (api.llama_adapter_lora_p_ctypes * n)(*handles.values()),
            n,
            (ctypes.c_float * n)(*scales.values()),
        )

    def _load(self, path: str) -> Any:
        try:
            found = os.stat(path)
        except OSError as error:
            raise ModelNotFoundError(f"there is no adapter at {path}", path=path) from error
        key = (os.path.realpath(path), found.st_mtime_ns, found.st_size)
        with self._lock:
            if key not in self._loaded:
                self._loaded[key] = self._read(path)
            return self._loaded[key]

    def _read(self, path: str) -> Any:
        try:
            wrong = soundness.adapter_complaint(path)
        except OSError as error:
            raise ModelFormatError(f"{path} cannot be read: {error}", path=path) from error
        if wrong is not None:
            raise ModelFormatError(f"{path} is not a usable LoRA adapter: {wrong}", path=path)
        check_addresses([path])
        with log.listening():
            handle = api.llama_adapter_lora_init(self._model, os.fsencode(path))
            if not handle:
                raise log.explain(
                    ModelFormatError(f"{path} is not a LoRA adapter for this model", path=path)
                )
        if api.llama_adapter_get_alora_n_invocation_tokens(handle):
            api.llama_adapter_lora_free(handle)
            raise refuse("activated LoRA", f"{path} works only after its invocation tokens")
        return handle
