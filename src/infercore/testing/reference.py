"""The reference backend: how it is announced, and how tests load a model with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from infercore import api
from infercore.errors import ModelNotFoundError
from infercore.protocols.hooks import API_VERSION
from infercore.testing import reference_model
from infercore.testing.limits import LimitedModel
from infercore.testing.products import adapter_target
from infercore.values import checks
from infercore.values.info import BackendDescriptor, Capabilities
from infercore.weight_files import lora

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from infercore.protocols.public import Model
    from infercore.testing.faults import Faults
    from infercore.values.config import AdapterSpec, ModelConfig


def reference_backend() -> BackendDescriptor:
    """Return the descriptor of the reference backend, named "reference".

    It reads directories in Hugging Face's format with a plain llama or BERT in them, and computes
    in float32 with NumPy: slow, and right. It can do all that `infercore.Capabilities` knows
    but use a GPU.
    """
    return BackendDescriptor(
        name="reference",
        api_version=API_VERSION,
        summary="Llama and BERT in plain NumPy, to test other backends against",
        formats=("hf",),
        match=reference_model.match,
        loader=reference_model.load,
        engine_version=lambda: f"numpy {np.__version__}",
        priority=-100,
        tries_in_child=False,
    )


def load_reference_model(
    path: str | os.PathLike[str] | None = None,
    *,
    config: ModelConfig | None = None,
    limits: Capabilities | None = None,
    faults: Faults | None = None,
    merged: Sequence[AdapterSpec] = (),
    **capabilities: Any,
) -> Model:
    """Return a model computed by the reference backend; by default the pack's storyteller.

    ``limits`` makes it less capable: its contexts lack what is not declared there. Keywords
    change single capabilities (``kv_remove="none"``). ``faults`` lets engine calls fail. LoRA
    adapters in ``merged`` are added to the weights themselves: an oracle for adapters that are
    applied while a model runs.
    """

    def load(where: str, built: ModelConfig) -> Any:
        inner: Any = reference_model.load(where, built)
        merge(inner, merged)
        kinds = limits or inner.capabilities
        checks.check_options(
            "capabilities", capabilities, [field.name for field in attrs.fields(Capabilities)]
        )
        return wrapped(inner, attrs.evolve(kinds, **capabilities), faults)

    descriptor = attrs.evolve(reference_backend(), loader=load)
    return api.CoreBackend(descriptor).load_model(storyteller() if path is None else path, config)


def merge(inner: Any, adapters: Sequence[AdapterSpec]) -> None:
    """Add adapters to a model's weights for good, in place of applying them at each product."""
    if not adapters:
        return
    target = adapter_target(inner.matrices)
    for pairs in [lora.read(adapter, target) for adapter in adapters]:
        for name, pair in pairs.items():
            inner.matrices[name].weight[...] += np.float32(pair.scale) * (pair.b @ pair.a)
    # Other weights than the files': no state goes from one to the other.
    inner.runtime = {**inner.runtime, "merged": [attrs.astuple(spec) for spec in adapters]}


def wrapped(inner: Any, capabilities: Capabilities, faults: Faults | None) -> Any:
    """Return an `EngineModel` with limits and faults around it, where there are any."""
    if capabilities != inner.capabilities:
        inner = LimitedModel(inner, capabilities)
    return inner if faults is None else faults.around(inner)


def engine_of(context: Any) -> Any:
    """Return the plugin's own context inside a guarded one, for a look past the API.

    Of a reference context, ``sequences`` has the cells that are really held.
    """
    inner = context._inner  # noqa: SLF001  (the look past the API is what is asked for)
    while hasattr(inner, "_inner"):
        inner = inner._inner  # noqa: SLF001
    return inner


def storyteller() -> str:
    """Return the path of the pack's storyteller. Raises `ModelNotFoundError` without the pack."""
    return pack_path("storyteller")


def pack_path(name: str) -> str:
    """Return where a model of the pack lies. Raises `ModelNotFoundError` without the pack."""
    try:
        import infercore_models  # noqa: PLC0415  (a distribution of its own)
    except ImportError as error:
        raise ModelNotFoundError(
            "the model pack (infercore-models) is not installed; give a path",
            path=name,
        ) from error
    return str(infercore_models.path(name, "hf"))
