"""Loaded weights: graph and tokenizer read, compiled when the first context needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infercore import ContextConfig, UnsupportedFeatureError
from infercore_openvino import (
    adapters,
    arithmetic,
    cpu,
    encoder,
    encoder_graph,
    files,
    graph,
    limits,
    memory,
    options,
)
from infercore_openvino.additions import Additions
from infercore_openvino.compiled import CompiledGraphs
from infercore_openvino.engine import BACKEND, check_files_left, logger, shared_core
from infercore_openvino.facts import model_info
from infercore_openvino.paged import PagedContext
from infercore_openvino.paged import capabilities as paged_capabilities
from infercore_openvino.recurrent import RecurrentContext
from infercore_openvino.recurrent import capabilities as recurrent_capabilities
from infercore_openvino.settings import DEFAULT_DEVICE, settings
from infercore_openvino.stateful import StatefulContext
from infercore_openvino.stateful import capabilities as stateful_capabilities
from infercore_openvino.tokenizer import JsonTokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infercore import Capabilities, MemoryPlan, ModelConfig
    from infercore_openvino.base import BaseContext
    from infercore_openvino.files import ModelFiles
    from infercore_openvino.graph import Graph
    from infercore_openvino.settings import Settings

_NO_GPU_HINT = "the model runs on one device as a whole; name that device with the field device"
_ALLOWED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    # all that a device can take: it takes the whole model
    "n_gpu_layers": ((None, 0, -1), _NO_GPU_HINT),
    "split_mode": ((None, "none"), _NO_GPU_HINT),
    "main_gpu": ((None, 0), _NO_GPU_HINT),
    "tensor_split": ((None,), _NO_GPU_HINT),
    "use_mlock": ((None, False), "the engine cannot lock weights in memory"),
    "check_tensors": ((None, False), "the engine does not look for broken values"),
}


def load(path: str, config: ModelConfig) -> OpenVinoModel:
    """Load the model at ``path``.

    Raises `ModelNotFoundError`, `ModelFormatError`, `UnsupportedFeatureError` for a field of
    ``config`` that cannot be honoured.
    """
    path = str(path)
    check(config)
    found = files.find(path)
    check_files_left()
    limits.before("the model")  # its tokenizer ends the process where it lacks any
    core = shared_core(use_mmap=config.use_mmap)
    device = _device(core, config.device)
    return OpenVinoModel(core, found, path, device, config)


def check(config: ModelConfig) -> None:
    """Raise for a field of ``config`` that cannot be honoured, its device aside."""
    options.check(config.backend_options, options.MODEL_OPTIONS)
    for name, (allowed, hint) in _ALLOWED.items():
        value = getattr(config, name)
        if value not in allowed:
            raise UnsupportedFeatureError(
                f"{name}={value!r} is not supported on backend {BACKEND!r}; {hint}",
                feature=name,
                backend=BACKEND,
                hint=hint,
            )


def _device(core: Any, asked: str | None) -> str:
    device = asked or DEFAULT_DEVICE
    available = core.available_devices
    if device in available:
        return device
    hint = "choose from: " + ", ".join(available)
    raise UnsupportedFeatureError(
        f"device={device!r} is not supported here; {hint}",
        feature="device",
        backend=BACKEND,
        hint=hint,
    )


_CONTEXTS: dict[str, type[BaseContext]] = {
    "paged": PagedContext,
    "stateful": StatefulContext,
    encoder_graph.FORM: encoder.EncoderContext,
    graph.RECURRENT: RecurrentContext,
}


def _settings_of(files: ModelFiles, config: ContextConfig, device: str) -> Settings:
    if files.has_cache:
        return settings(config, files, device=device)
    return encoder.settings_of(config, files, device)


def _form_of(asked: Settings, default: str, device: str) -> str:
    """Return the form to run. Raises `UnsupportedFeatureError` for what it cannot honour."""
    form = asked.form or (default if asked.causal else "stateful")
    if default == graph.RECURRENT:
        form = _recurrent_form(asked)
    cpu.check(asked)
    arithmetic.check_offered(asked.inference, device)
    _CONTEXTS[form].check(asked)
    return form


def _recurrent_form(asked: Settings) -> str:
    if asked.form is None:
        return graph.RECURRENT
    hint = "its graph keeps states that sum up a text; leave it out"
    raise UnsupportedFeatureError(
        feature=f"form={asked.form!r} of a recurrent model", backend=BACKEND, hint=hint
    )


def plan(path: str, config: ModelConfig, context: ContextConfig) -> MemoryPlan:
    """Return the bytes that the model at ``path`` and a context on it will take.

    Raises what loading and opening raise for a field that cannot be honoured. Of what is no
    encoder and sums up no text it is the plan of the paged form: only loading the graph tells
    whether the engine can make that.
    """
    check(config)
    device = DEFAULT_DEVICE if config.device is None else _device(shared_core(), config.device)
    return plan_of(files.find(path), context, device)


def plan_of(
    found: ModelFiles, config: ContextConfig, device: str, form: str | None = None
) -> MemoryPlan:
    """Return the bytes that a context of ``config`` takes; ``form`` is the model's own."""
    asked = _settings_of(found, config, device)
    _form_of(asked, form or _usual_form(found), device)
    return memory.plan(found, asked)


def _usual_form(found: ModelFiles) -> str:
    if found.is_recurrent:
        return graph.RECURRENT
    return "paged" if found.has_cache else encoder_graph.FORM


class OpenVinoModel:
    """An `EngineModel`: one graph, in the forms that contexts ask for."""

    def __init__(
        self, core: Any, found: ModelFiles, path: str, device: str, config: ModelConfig
    ) -> None:
        self._files = found
        self._device = device
        self._graphs = CompiledGraphs(
            core,
            device,
            lambda form: (
                encoder_graph.build(core, found, path)
                if form == encoder_graph.FORM
                else graph.build(core, found, form, path)
            ),
            extra={name.upper(): value for name, value in config.backend_options.items()},
            path=path,
        )
        first = self._first_graph()
        self._default_form = first.form
        self._default_graph = first
        self.info = model_info(found, first.shape)
        self.tokenizer = JsonTokenizer(found, self.info.n_vocab, path)
        self.files = found.of_identity
        self.runtime = {"device": device}
        self.capabilities = self._capabilities(first)

    def _first_graph(self) -> Graph:
        """The paged form where the engine can make it, else the stateful one."""
        if not self._files.has_cache:
            return self._graphs.graph(encoder_graph.FORM)
        if self._files.is_recurrent:
            return self._graphs.graph(graph.RECURRENT)
        try:
            return self._graphs.graph("paged")
        except UnsupportedFeatureError as error:
            logger.warning("%s; falling back to the stateful form", error)
            return self._graphs.graph("stateful")

    def native_handle(self) -> Any:
        """Return the ``openvino.Model`` in its default form, from which contexts are compiled."""
        return self._default_graph.model

    def _capabilities(self, first: Graph) -> Capabilities:
        default = _settings_of(self._files, ContextConfig(), self._device)
        if first.form == encoder_graph.FORM:
            return encoder.capabilities(default)
        if first.form == graph.RECURRENT:
            return recurrent_capabilities(default)
        if first.form == "paged":
            return paged_capabilities(default, first, shift=first.turns_keys)
        return stateful_capabilities(default, first)

    def new_context(self, config: ContextConfig) -> BaseContext:
        """Return a new context. Raises `UnsupportedFeatureError` and `OutOfMemoryError`."""
        asked = _settings_of(self._files, config, self._device)
        memory.check_cache_fits(self._files, asked)
        form = _form_of(asked, self._default_form, self._device)
        joined = adapters.read(asked.adapters, self._graphs.graph(form))
        added = Additions(adapters=joined)
        compiled = self._graphs.take(form, asked, added)
        try:
            context = _CONTEXTS[form](compiled, self._graphs, asked, added)
        except BaseException:
            self._graphs.give_back(compiled)
            raise
        if isinstance(context, encoder.EncoderContext):
            context.separator = self.tokenizer.sep
        return context

    def plan_memory(self, config: ContextConfig) -> MemoryPlan:
        """Return the bytes that a context of ``config`` will take."""
        return plan_of(self._files, config, self._device, self._default_form)

    def close(self) -> None:
        """Free the weights."""
        self._graphs.close()
        del self._default_graph
