"""What infercore finds: the backend's descriptor. Imports no engine."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from infercore import API_VERSION, BackendDescriptor, hookimpl
from infercore_llamacpp import gguf, release

if TYPE_CHECKING:
    from infercore import ContextConfig, DeviceInfo, MemoryPlan, ModelConfig

MODEL_OPTIONS = ("kv_overrides", "no_host", "use_extra_bufts")


@hookimpl
def infercore_backend() -> BackendDescriptor:
    """Return the descriptor of the llama.cpp backend."""
    return BackendDescriptor(
        name="llamacpp",
        api_version=API_VERSION,
        summary="GGUF models through llama.cpp (llama-cpp-python)",
        formats=("gguf",),
        match=gguf.match,
        loader=load,
        check=check,
        engine_version=engine_version,
        devices=devices,
        plan_memory=plan_memory,
        files=gguf.parts,
        check_file=gguf.check_file,
        prepare=prepare,
        model_options=MODEL_OPTIONS,
        neutral_options=("no_host",),
        priority=10,
        preload=("infercore_llamacpp.model", "llama_cpp.llama_cpp"),
    )


def load(path: str, config: ModelConfig) -> Any:
    """Return the model at ``path``. Raises `ModelLoadError` and `BackendUnavailableError`."""
    from infercore_llamacpp.model import LlamaModel  # noqa: PLC0415  (imports the engine)

    return LlamaModel.load(path, config)


def prepare(*, in_child: bool) -> Any:
    """Import all that `load` needs; in a trial's child only the bindings of llama-cpp-python."""
    if in_child:
        release.leave_out_front()
    from infercore_llamacpp.model import LlamaModel  # noqa: PLC0415  (imports the engine)

    return partial(LlamaModel.load, is_checked=in_child)


def plan_memory(
    path: str, model_config: ModelConfig | None, config: ContextConfig | None
) -> MemoryPlan:
    """Return the bytes that the model at ``path`` and a context on it will take."""
    from infercore_llamacpp.plan import plan_memory as plan  # noqa: PLC0415

    return plan(path, model_config, config)


def check() -> None:
    """Raise `BackendUnavailableError` where llama-cpp-python is missing or of another release.

    Whether its library can be loaded shows when a model is: importing it here would make every
    listing of backends start an engine.
    """
    release.check_version(release.installed())


def engine_version() -> str:
    """Return the version of llama-cpp-python, which carries one llama.cpp."""
    return release.installed()


def devices() -> list[DeviceInfo]:
    """Return the compute devices that this build of llama.cpp sees."""
    from infercore_llamacpp.devices import list_devices  # noqa: PLC0415

    return [device.info for device in list_devices()]
