"""Compiled graphs: made once for each set of properties, shared by contexts, freed when idle."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore import ModelLoadError, SessionFatalError, UnsupportedFeatureError
from infercore_openvino import arithmetic
from infercore_openvino.additions import Additions, with_additions
from infercore_openvino.arithmetic import GROUP_SIZE
from infercore_openvino.engine import (
    BACKEND,
    check_files_left,
    first_lines,
    keep_if_forked,
    logger,
)
from infercore_openvino.graph import with_frequencies, without_causality
from infercore_openvino.limits import compiling

if TYPE_CHECKING:
    from collections.abc import Callable

    from infercore_openvino.arithmetic import Arithmetic
    from infercore_openvino.graph import Graph
    from infercore_openvino.settings import Settings

_BLOCKS = [True, False, False, False]
"""What is not fixed of [blocks, heads, tokens, head size], the layout of keys and values."""
NOTHING = Additions()
_alive: weakref.WeakSet[Compiled] = weakref.WeakSet()


def _keep_all() -> None:
    for compiled in _alive:
        if compiled.engine is not None:
            keep_if_forked(compiled.engine)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_all)


class Compiled:
    """One compiled graph and the number of contexts that run it.

    ``group_size`` activations share a scale where they are rounded to 8 bits, 0 = they are not.
    ``n_streams`` share the engine's threads, where each context was to have a number of its own.
    """

    def __init__(self, graph: Graph, engine: Any, group_size: int, n_streams: int = 1) -> None:
        self.graph = graph
        self.engine: Any = engine
        self.group_size = group_size
        self.n_users = 0
        self.n_threads = int(engine.get_property("INFERENCE_NUM_THREADS")) // n_streams
        self.n_streams = int(engine.get_property("NUM_STREAMS"))
        self.rotates: bool | None = None
        self.is_causal: bool | None = None
        self.goes_on: bool | None = None
        _alive.add(self)
        keep_if_forked(engine)
        self._dtypes = {
            name: port.get_element_type().to_dtype()
            for port in engine.inputs
            for name in port.get_names()
        }

    def new_request(self, added: Additions) -> Any:
        """Return a request that computes with what is added; its numbers must stay alive."""
        request = self.engine.create_infer_request()
        added.bind(self.engine, request)
        return request

    def given(self, **arrays: Any) -> dict[str, Any]:
        """Return those of ``arrays`` that the graph has an input for, in its type."""
        dtypes = self._dtypes
        return {
            name: np.ascontiguousarray(array, dtype=dtypes[name])
            for name, array in arrays.items()
            if name in dtypes
        }

    def drop(self) -> None:
        """Give its memory back, for good: run again after this, the engine corrupts the heap."""
        if self.graph.form != "paged":  # they would keep their activations; the paged form does not
            self.engine.release_memory()
        self.engine = None

    def caches(self) -> list[Any]:
        """The inputs that are KV blocks: all keys, then all values, in the order of the layers."""
        ports = [p for p in self.engine.inputs if "_cache." in p.get_any_name()]
        return sorted(ports, key=_cache_order)


def _cache_order(port: Any) -> tuple[str, int]:
    kind, layer = port.get_any_name().split(".")
    return kind, int(layer)


class CompiledGraphs:
    """The compiled graphs of one model."""

    def __init__(
        self,
        core: Any,
        device: str,
        build: Callable[[str], Graph],
        *,
        extra: dict[str, Any],
        path: str,
    ) -> None:
        self._path = path
        self._core = core
        self._device = device
        self._build = build
        self._extra = extra
        self._lock = threading.Lock()
        self._graphs: dict[str, Graph] = {}
        self._compiled: dict[tuple[Any, ...], Compiled] = {}
        self._rounds: dict[tuple[str, int], bool] = {}

    def graph(self, form: str) -> Graph:
        """Return the graph in ``form``, read once."""
        if form not in self._graphs:
            self._graphs[form] = self._build(form)
        return self._graphs[form]

    def take(self, form: str, settings: Settings, added: Additions = NOTHING) -> Compiled:
        """Return the compiled graph for ``settings`` and what is added, with one more user."""
        with self._lock:
            group_size = self._group_size(form, settings.arithmetic)
            properties = {**settings.properties, GROUP_SIZE: str(group_size)}
            key = (
                form,
                added.key,
                settings.causal,
                settings.rope,
                settings.n_streams,
                *sorted(properties.items()),
            )
            if key not in self._compiled:
                self._drop_idle()
                self._compiled[key] = self._compile(form, settings, properties, added)
            compiled = self._compiled[key]
            compiled.n_users += 1
        return compiled

    def _group_size(self, form: str, asked: Arithmetic) -> int:
        """Return the group size that has an effect here: that asked for, or 0."""
        model = self.graph(form).model
        size = asked.group_size
        if size is None:
            size = arithmetic.default_group_size(self._core, self._device, model)
        key = (asked.inference, size)
        if size and key not in self._rounds:
            self._rounds[key] = arithmetic.rounds(self._core, self._device, model, *key)
        return size if size and self._rounds[key] else 0

    def give_back(self, compiled: Compiled) -> None:
        """Take a user away; what has none stays for the next one, until another is compiled."""
        with self._lock:
            compiled.n_users -= 1

    def close(self) -> None:
        """Free all."""
        with self._lock:
            self._drop_idle()
            self._graphs.clear()

    def _drop_idle(self) -> None:
        for key in [k for k, c in self._compiled.items() if not c.n_users]:
            self._compiled.pop(key).drop()

    def _compile(
        self, form: str, settings: Settings, properties: dict[str, Any], added: Additions
    ) -> Compiled:
        graph = self.graph(form)
        if not settings.causal:
            graph = without_causality(graph)
        if settings.rope is not None:
            graph = with_frequencies(graph, settings.rope)
        graph = with_additions(graph, added)
        properties = {**self._extra, **properties}
        check_files_left()
        logger.debug("compiling the %s form for %s with %s", form, self._device, properties)
        try:
            with compiling("the compiled graph"):
                engine = self._core.compile_model(graph.model, self._device, properties)
        except SessionFatalError:
            raise
        except RuntimeError as error:
            raise ModelLoadError(
                f"{self._path} cannot be compiled for {self._device}: {first_lines(error)}",
                path=self._path,
            ) from error
        compiled = Compiled(graph, engine, int(properties[GROUP_SIZE]), settings.n_streams)
        _check_in_force(compiled, settings)
        return compiled


def _check_in_force(compiled: Compiled, settings: Settings) -> None:
    """Compare what was asked with what the engine made of it."""
    if settings.n_threads not in {None, compiled.n_threads}:
        raise _not_honoured(
            "n_threads", settings.n_threads, f"this machine gives at most {compiled.n_threads}"
        )
    _check_caches(compiled.caches(), settings)


def _check_caches(caches: list[Any], settings: Settings) -> None:
    others = {port.get_element_type().to_string() for port in caches} - {settings.kv_type}
    if others:
        raise _not_honoured("type_k", settings.kv_type, f"the engine chose {', '.join(others)}")
    for port in caches:
        n_blocks, *of_block = port.get_partial_shape()
        if [n_blocks.is_dynamic, *(n.is_dynamic for n in of_block)] != _BLOCKS:
            raise _not_honoured("device", "", "its cache has a layout that is not known here")


def _not_honoured(name: str, asked: object, hint: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(
        f"{name}={asked!r} is not honoured by the engine; {hint}",
        feature=name,
        backend=BACKEND,
        hint=hint,
    )
