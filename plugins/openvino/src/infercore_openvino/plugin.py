"""The plugin's entry: what it is called, what it reads. The engine is imported when first used."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any

from infercore import (
    API_VERSION,
    BackendDescriptor,
    BackendUnavailableError,
    DeviceInfo,
    hookimpl,
)
from infercore_openvino.files import bin_of, find, xml_of
from infercore_openvino.options import CONTEXT_OPTIONS, MODEL_OPTIONS

if TYPE_CHECKING:
    from infercore import ContextConfig, MemoryPlan, ModelConfig

_OLDEST, _TOO_NEW = (2026, 4), (2027,)
_KINDS = {"CPU": "cpu", "GPU": "gpu", "NPU": "npu"}
_SCORE = 100
_INCOMPLETE_SCORE = 20  # so that the loader, not the choice of a backend, says what is missing


def match(path: str) -> int:
    """Score a folder with an exported model, or its .xml file."""
    xml = xml_of(str(path))
    if xml is None:
        return 0
    return _SCORE if os.path.isfile(bin_of(xml)) else _INCOMPLETE_SCORE


def load(path: str, config: ModelConfig) -> Any:
    """Import the engine and load the model."""
    check()
    from infercore_openvino.model import load as load_model  # noqa: PLC0415

    return load_model(str(path), config)


def prepare(*, in_child: bool) -> Any:
    """Import all that `load` needs; in a trial's child without the engine's model converter."""
    if in_child:
        sys.modules.setdefault("openvino.tools.ovc", None)  # type: ignore[arg-type]
    from infercore_openvino.model import load as load_model  # noqa: PLC0415

    load_model  # noqa: B018
    return load


def engine_version() -> str:
    """Return the version of the engine that is installed."""
    return metadata.version("openvino")


def check() -> None:
    """Raise `BackendUnavailableError` where the engine cannot run."""
    try:
        installed = engine_version()
    except metadata.PackageNotFoundError as error:
        raise _unavailable("openvino is not installed") from error
    numbers = tuple(int(part) for part in installed.split(".")[:2] if part.isdigit())
    if not _OLDEST <= numbers < _TOO_NEW:
        raise _unavailable(f"openvino {installed} is not one of 2026.4 up to 2027 (excluded)")
    for module in ("openvino", "tokenizers"):
        if importlib.util.find_spec(module) is None:
            raise _unavailable(f"{module} is not installed")


def _unavailable(reason: str) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"backend openvino cannot run here: {reason}; install the plugin again",
        backend="openvino",
        reason=reason,
    )


def devices() -> tuple[DeviceInfo, ...]:
    """Return the devices that the engine finds here."""
    from infercore_openvino.engine import shared_core  # noqa: PLC0415  (imports the engine)

    core = shared_core()
    return tuple(_device(core, name) for name in core.available_devices)


def _device(core: Any, name: str) -> DeviceInfo:
    kind = _KINDS.get(name.split(".", maxsplit=1)[0], "accel")
    if kind == "gpu" and str(core.get_property(name, "DEVICE_TYPE")) == "Type.INTEGRATED":
        kind = "igpu"
    total = _ram_bytes() if kind == "cpu" else _device_bytes(core, name)
    return DeviceInfo(
        name=name,
        kind=kind,
        description=str(core.get_property(name, "FULL_DEVICE_NAME")).strip(),
        memory_total_bytes=total,
    )


def _device_bytes(core: Any, name: str) -> int | None:
    try:
        return int(core.get_property(name, "GPU_DEVICE_TOTAL_MEM_SIZE"))
    except (RuntimeError, TypeError, ValueError):
        return None


def _ram_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def plan_memory(path: str, model: ModelConfig, context: ContextConfig) -> MemoryPlan:
    """Return the bytes that such a context will take, from the files alone."""
    from infercore_openvino.model import plan  # noqa: PLC0415

    return plan(str(path), model, context)


@hookimpl
def infercore_backend() -> BackendDescriptor:
    """Describe this backend."""
    return BackendDescriptor(
        name="openvino",
        api_version=API_VERSION,
        summary="OpenVINO: exported Hugging Face models (IR) on Intel and other processors",
        formats=("openvino",),
        match=match,
        loader=load,
        check=check,
        engine_version=engine_version,
        devices=devices,
        plan_memory=plan_memory,
        check_file=find,
        prepare=prepare,
        model_options=tuple(MODEL_OPTIONS),
        context_options=tuple(CONTEXT_OPTIONS),
        neutral_options=("cache_dir",),
        trial_options={"dynamic_quantization_group_size": 0},
        compiles_late=True,
        preload=("infercore_openvino.model", "openvino", "openvino_tokenizers"),
    )
