"""Wrong samplers."""

from __future__ import annotations

from typing import Any

import attrs

from conformance.full_toy import FullModel, NativeSampler
from conformance.mutants import around, breaks, instead, nothing
from infercore.engine.model import GuardedModel
from infercore.errors import InvalidInputError
from infercore.sampling.portable import PortableSampler


def configured(m: Any, **changes: Any) -> None:
    """Let samplers work with other settings: ``field=lambda config: value``."""

    def init(old: Any, self: Any, config: Any, **kwargs: Any) -> None:
        made = {name: of(config) for name, of in changes.items()}
        old(self, attrs.evolve(config, **made), **kwargs)

    around(m, PortableSampler, "__init__", init)


@breaks("SAMP-1", "SAMP-15", "SAMP-18")
def temperature_0_is_not_the_likeliest(m: Any) -> None:
    configured(m, temperature=lambda config: config.temperature or 1e6, seed=lambda _: 1)


@breaks("SAMP-2", "SAMP-16", "SAMP-19")
def the_seed_is_ignored(m: Any) -> None:
    configured(m, seed=lambda _: None)


@breaks("SAMP-3")
def there_is_one_seed(m: Any) -> None:
    configured(m, seed=lambda _: 1)


@breaks("SAMP-30")
def a_seed_of_zero_is_none(m: Any) -> None:
    configured(m, seed=lambda config: config.seed or None)


@breaks("SAMP-4", "SAMP-18")
def top_k_is_ignored(m: Any) -> None:
    configured(m, top_k=lambda _: 0)


@breaks("SAMP-5")
def top_p_is_ignored(m: Any) -> None:
    configured(m, top_p=lambda _: 1.0)


@breaks("SAMP-5")
def min_p_is_ignored(m: Any) -> None:
    configured(m, min_p=lambda _: 0.0)


@breaks("SAMP-6", "SAMP-18")
def the_bias_is_ignored(m: Any) -> None:
    configured(m, logit_bias=lambda _: {})


@breaks("SAMP-7", "SAMP-19")
def a_sample_is_accepted_twice(m: Any) -> None:
    def sample(old: Any, self: Any, *args: Any) -> int:
        token: int = old(self, *args)
        self.observe([token])
        return token

    around(m, PortableSampler, "sample", sample)


@breaks("SAMP-8", "SAMP-17")
def what_is_observed_is_forgotten(m: Any) -> None:
    nothing(m, PortableSampler, "observe")


@breaks("SAMP-9")
def a_clone_is_the_sampler_itself(m: Any) -> None:
    m.setattr(PortableSampler, "clone", lambda self: self)


@breaks("SAMP-10", "SAMP-8")
def a_reset_does_nothing(m: Any) -> None:
    nothing(m, PortableSampler, "reset")


@breaks("SAMP-11")
def the_temperature_is_another(m: Any) -> None:
    configured(m, temperature=lambda config: config.temperature * 3)


@breaks("SAMP-12")
def ends_are_not_ignored(m: Any) -> None:
    configured(m, ignore_eos=lambda _: False)


@breaks("SAMP-14")
def bad_sampling_becomes_the_default(m: Any) -> None:
    old = GuardedModel.new_sampler
    instead(m, GuardedModel, "new_sampler", InvalidInputError, old)


@breaks("SAMP-15")
def the_last_row_is_always_sampled(m: Any) -> None:
    around(m, PortableSampler, "sample", lambda old, self, context, _=-1: old(self, context, -1))


@breaks("SAMP-18")
def the_engine_s_sampler_has_other_candidates(m: Any) -> None:
    around(m, NativeSampler, "sample", lambda old, self, *a: (old(self, *a) + 1) % 200)


@breaks("SAMP-21")
def the_engine_s_sampler_has_no_min_p(m: Any) -> None:
    def new_sampler(old: Any, self: Any, config: Any) -> Any:
        return old(self, attrs.evolve(config, min_p=0.0, top_p=1.0))

    around(m, FullModel, "new_sampler", new_sampler)


@breaks("SAMP-21", base="reference")
def the_engine_s_sampler_observes_nothing(m: Any) -> None:
    from infercore.testing.reference_sampler import ReferenceSampler

    nothing(m, ReferenceSampler, "observe")
