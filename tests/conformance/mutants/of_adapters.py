"""Wrong adapters."""

from __future__ import annotations

from typing import Any

from conformance.full_toy import FullContext
from conformance.mutants import around, breaks, nothing
from infercore.session import base
from infercore.testing.products import Products


@breaks("LORA-1", "LORA-2", base="reference")
def adapters_are_read_and_not_applied(m: Any) -> None:
    around(m, Products, "__init__", lambda old, self, workers, _: old(self, workers, ()))


@breaks("LORA-1")
def the_scale_is_not_looked_at(m: Any) -> None:
    def set_adapters(old: Any, self: Any, adapters: Any) -> None:
        old(self, adapters)
        self.strength = 0.5 * len(adapters)

    around(m, FullContext, "set_adapters", set_adapters)


@breaks("LORA-2", base="reference")
def the_rank_is_not_divided_by(m: Any) -> None:
    def init(old: Any, self: Any, workers: Any, deltas: Any) -> None:
        import attrs

        old(self, workers, [attrs.evolve(delta, scale=2 * delta.scale) for delta in deltas])

    around(m, Products, "__init__", init)


@breaks("LORA-3")
def only_the_last_adapter_counts(m: Any) -> None:
    def set_adapters(old: Any, self: Any, adapters: Any) -> None:
        old(self, tuple(adapters)[-1:])
        self.effective["adapters"] = tuple(adapters)

    around(m, FullContext, "set_adapters", set_adapters)


@breaks("LORA-1", "LORA-4")
def adapters_are_added_to_those_before(m: Any) -> None:
    def set_adapters(old: Any, self: Any, adapters: Any) -> None:
        before = self.strength
        old(self, adapters)
        self.strength += before

    around(m, FullContext, "set_adapters", set_adapters)


@breaks("LORA-5")
def adapters_given_at_the_start_are_forgotten(m: Any) -> None:
    def init(old: Any, self: Any, config: Any) -> None:
        old(self, config)
        self.strength = 0.0

    around(m, FullContext, "__init__", init)


@breaks("LORA-6")
def a_refused_adapter_takes_the_others_along(m: Any) -> None:
    def set_adapters(old: Any, self: Any, adapters: Any) -> None:
        self.strength = 0.0
        old(self, adapters)

    around(m, FullContext, "set_adapters", set_adapters)


@breaks("LORA-6")
def a_file_that_is_no_adapter_counts_as_none(m: Any) -> None:
    from conformance import full_toy
    from infercore.errors import ModelFormatError

    old = full_toy.strength_of

    def strength_of(path: str) -> float:
        try:
            return old(path)
        except ModelFormatError:
            return 0.0

    m.setattr(full_toy, "strength_of", strength_of)


@breaks("LORA-6", base="reference")
def the_list_is_emptied_before_files_are_read(m: Any) -> None:
    from infercore.testing.reference_base import Base

    def set_adapters(old: Any, self: Any, adapters: Any) -> None:
        self._adapters = []
        old(self, adapters)

    around(m, Base, "set_adapters", set_adapters)


@breaks("LORA-6", base="reference")
def a_refused_adapter_has_no_path(m: Any) -> None:
    from infercore.errors import ModelFormatError, ModelLoadError
    from infercore.testing.reference_base import Base

    def set_adapters(old: Any, self: Any, adapters: Any) -> None:
        try:
            old(self, adapters)
        except ModelLoadError as error:
            raise ModelFormatError(str(error), path="") from error

    around(m, Base, "set_adapters", set_adapters)


@breaks("LORA-7")
def adapters_are_no_part_of_the_identity(m: Any) -> None:
    m.setattr(base, "adapter_identities", lambda _: [])


@breaks("LORA-8")
def clearing_a_context_drops_its_adapters(m: Any) -> None:
    def remove(old: Any, self: Any, *args: Any) -> Any:
        self.strength = 0.0
        return old(self, *args)

    around(m, FullContext, "seq_remove", remove)


@breaks("CAP-16")
def every_list_of_adapters_is_taken(m: Any) -> None:
    nothing(m, FullContext, "set_adapters")
