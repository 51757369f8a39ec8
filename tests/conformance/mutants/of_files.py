"""Wrong backends over real attention that read their files, options and devices wrongly."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np

import infercore
from conformance.mutants import around, breaks, result
from infercore.conformance import Rig, reference
from infercore.conformance.laws import headers, kinds
from infercore.engine.model import GuardedModel
from infercore.errors import InvalidInputError, ModelLoadError
from infercore.testing import (
    engine_of,
    llama,
    reference_model,
    reference_settings,
    reference_tokenizer,
)
from infercore.testing.reference_context import ReferenceContext
from infercore.testing.reference_model import Loaded, ReferenceModel
from infercore.testing.reference_sequences import Sequences
from infercore.values import checks
from infercore.values.info import BackendInfo, DeviceInfo
from infercore.weight_files import safetensors

real = {"base": "reference"}


@breaks("CAP-35", **real)
def half_of_the_weights_are_counted(m: Any) -> None:
    result(m, Loaded, "_info", lambda info: attrs.evolve(info, n_params=info.n_params // 2))


@breaks("BAD-18", **real)
def a_lie_is_met_by_a_mistake(m: Any) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise KeyError("what is this?")

    m.setattr(reference_tokenizer, "ModelFormatError", refused)


@breaks("BAD-18", **real)
def what_lacks_a_layer_is_the_usual_model(m: Any) -> None:
    old = headers.load_reference_model

    def load(path: Any = None, **fields: Any) -> Any:
        try:
            return old(path, **fields)
        except ModelLoadError as error:
            if "layers.4." not in str(error):
                raise
            return old(None, **fields)

    m.setattr(headers, "load_reference_model", load)


@breaks("CAP-35", **real)
def a_config_of_sliding_layers_is_met_by_a_mistake(m: Any) -> None:
    old = llama._check_plain

    def checked(config: Any, *args: Any) -> Any:
        if config.get("sliding_window"):
            raise AttributeError("sliding_window")
        return old(config, *args)

    m.setattr(llama, "_check_plain", checked)


@breaks("CAP-36", **real)
def narrow_weights_take_no_control_vector(m: Any) -> None:
    opened: list[Any] = []

    def init(old: Any, self: Any, model: Any, effective: Any) -> None:
        old(self, model, effective)
        opened.append(model)

    def add(old: Any, self: Any, directions: Any) -> None:
        old(self, directions)
        if self._llama is opened[0]:  # the law's first context is theirs
            self._added = None

    around(m, ReferenceContext, "__init__", init)
    around(m, ReferenceContext, "set_control_vector", add)


@breaks("CAP-36", **real)
def narrow_weights_lose_their_last_bit(m: Any) -> None:
    old = safetensors._tensor

    def tensor(entry: Any, body: Any) -> Any:
        found = old(entry, body)
        return found * np.float32(1.01) if entry["dtype"] == "BF16" else found

    m.setattr(safetensors, "_tensor", tensor)


@breaks("BAD-19", **real)
def unknown_options_are_taken(m: Any) -> None:
    m.setattr(checks, "check_options", lambda field, options, known: None)


def with_a_size(m: Any, most: int) -> None:
    """Give contexts an option ``size`` said to be 1 to 4; they take up to ``most``."""

    def opened(_: Any, options: Any, **__: Any) -> None:
        ((name, value),) = options.items()
        if type(value) is not int or not 1 <= value <= most:
            raise InvalidInputError(
                f"{name} is none", field=name, value=value, allowed="an integer from 1 to 4"
            )

    def begin(old: Any, self: Any, name: str, seed: int) -> None:
        old(self, name, seed)
        self.encoder = None  # a real one has no such option

    around(m, Rig, "begin", begin)
    about = SimpleNamespace(model_options=(), context_options=("size",))
    record = SimpleNamespace(name="reference", descriptor=about)
    registry = SimpleNamespace(records=lambda: [record], get=lambda name: about)
    m.setattr(kinds, "default_registry", lambda: registry)
    m.setattr(kinds, "_open", opened)


@breaks("BAD-19", **real)
def the_last_of_what_is_allowed_is_refused(m: Any) -> None:
    with_a_size(m, most=3)


@breaks("CAP-48", **real)
def an_own_option_stays_for_later_contexts(m: Any) -> None:
    sizes: list[int] = []

    def new_context(old: Any, self: Any, config: Any = None, **fields: Any) -> Any:
        sizes.extend((fields.pop("backend_options", None) or {}).values())
        context = old(self, config, **fields)
        engine_of(context).size = sizes[0] if sizes else None
        return context

    def begin(old: Any, self: Any, name: str, seed: int) -> None:
        old(self, name, seed)
        self.own_options = [({"size": 2}, lambda context: engine_of(context).size == 2)]

    around(m, GuardedModel, "new_context", new_context)
    around(m, Rig, "begin", begin)
    about = SimpleNamespace(model_options=(), context_options=("size",))
    record = SimpleNamespace(name="reference", descriptor=about)
    registry = SimpleNamespace(records=lambda: [record], get=lambda name: about)
    m.setattr(kinds, "default_registry", lambda: registry)


@breaks("CAP-28", **real)
def the_digest_passes_over_the_config(m: Any) -> None:
    def init(old: Any, self: Any, *args: Any, **fields: Any) -> None:
        old(self, *args, **fields)
        self.files = tuple(file for file in self.files if not file.endswith("config.json"))

    around(m, Loaded, "__init__", init)


@breaks("CAP-37", **real)
def one_device_is_announced_twice(m: Any) -> None:
    device = DeviceInfo(name="CPU", kind="cpu", description="a processor")
    found = BackendInfo(name="reference", available=True, devices=(device, device))
    m.setattr(infercore, "backends", lambda devices=False: [found])


@breaks("CAP-37", **real)
def a_device_is_of_a_kind_that_there_is_not(m: Any) -> None:
    device = DeviceInfo(name="NPU", kind="tensor", description="something else")
    found = BackendInfo(name="reference", available=True, devices=(device,))
    m.setattr(infercore, "backends", lambda devices=False: [found])


@breaks("CAP-37", **real)
def a_processor_is_announced_as_something_else(m: Any) -> None:
    device = DeviceInfo(name="CPU", kind="accel", description="a processor")
    found = BackendInfo(name="reference", available=True, devices=(device,))
    m.setattr(infercore, "backends", lambda devices=False: [found])


@breaks("ENC-11", **real)
def more_positions_than_were_learned(m: Any) -> None:
    old = reference_settings.resolve_encoder

    def resolve(config: Any, shape: Any, pooling: str) -> Any:
        return old(config, attrs.evolve(shape, n_ctx_train=2 * shape.n_ctx_train), pooling)

    m.setattr(reference_settings, "resolve_encoder", resolve)


@breaks("MEM-9", **real)
def a_plan_keeps_what_it_read(m: Any) -> None:
    kept: list[bytes] = []

    def plan(old: Any, self: Any, *args: Any) -> Any:
        kept.append(b"x" * 2**20)
        return old(self, *args)

    around(m, ReferenceModel, "plan_memory", plan)


@breaks("MEM-9", **real)
def a_plan_of_what_is_gone_is_a_mistake(m: Any) -> None:
    def plan(old: Any, self: Any, *args: Any) -> Any:
        if not Path(self.files[0]).exists():
            raise KeyError(self.files[0])
        return old(self, *args)

    around(m, ReferenceModel, "plan_memory", plan)


@breaks("DEC-32", **real)
def any_file_holds_the_same_model(m: Any) -> None:
    old = reference.load_reference_model

    def load(path: Any = None, **fields: Any) -> Any:
        return old(None if str(path).endswith("t5.gguf") else path, **fields)

    m.setattr(reference, "load_reference_model", load)


@breaks("MEM-14", **real)
def lack_of_memory_is_any_error(m: Any) -> None:
    def new_context(old: Any, self: Any, config: Any) -> Any:
        if (config.n_ctx or 0) > 2**13:
            raise RuntimeError("std::bad_alloc")
        return old(self, config)

    around(m, ReferenceModel, "new_context", new_context)


@breaks("CAP-45", **real)
def scaling_that_files_state_is_passed_over(m: Any) -> None:
    def check_plain(old: Any, config: Any, rope: Any) -> None:
        old(config, {**rope, "rope_type": "default"})

    around(m, llama, "_check_plain", check_plain)


@breaks("CAP-46", **real)
def texts_of_other_names_are_restored_without_a_value(m: Any) -> None:
    class Kinds(dict[str, Any]):
        def get(self, name: Any, default: Any = None) -> Any:
            return super().get(name, ReferenceModel)

    def shape(cls: Any, config: Any, path: str) -> Any:
        del cls
        return from_config({**config, "model_type": "llama"}, path)

    from_config = llama.Shape.from_config
    m.setattr(llama.Shape, "from_config", classmethod(shape))
    m.setattr(reference_model, "KINDS", Kinds(reference_model.KINDS))
    names: set[str] = set()

    def new_context(old: Any, self: Any, config: Any) -> Any:
        names.clear()
        names.add(self.info.architecture)
        return old(self, config)

    def load(old: Any, self: Any, seq_id: int, data: bytes) -> None:
        old(self, seq_id, data)
        if "llama" not in names:
            held = self.sequences[seq_id]
            less = held.v.copy()
            less[:, 0] = 0
            self.sequences[seq_id] = attrs.evolve(held, v=less)

    around(m, ReferenceModel, "new_context", new_context)
    around(m, Sequences, "load_sequence", load)
