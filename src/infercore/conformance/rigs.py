"""Finding the rig of a backend by its name."""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

import attrs

import infercore
from infercore.conformance import reference
from infercore.conformance.options import OPTIONS
from infercore.conformance.requirements import REQUIREMENTS
from infercore.conformance.rig import Observation, Placed, Rig
from infercore.engine import calls
from infercore.errors import BackendNotFoundError, PluginLoadError
from infercore.values import checks

ENTRY_POINT_GROUP = "infercore.conformance"
POOL = "-pool"
"""Behind a rig's name: the same rig, with the sessions of a pool."""
ISOLATED = "-isolated"
"""Behind a rig's name: the same rig, with a pool's sessions whose engine is another process."""


def rig_names() -> list[str]:
    """Return the names of all backends that announce a rig."""
    found = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    return sorted({entry.name for entry in found})


def find_rig(name: str, *, model: str | None = None) -> Rig:
    """Return the rig of the backend ``name``; ``model`` is a path to use in place of its own.

    "NAME-pool" is the rig NAME with sessions of a pool, "NAME-isolated" with those of a pool whose
    engine is a process of its own, unless a rig of that name is announced.
    Raises `BackendNotFoundError` where no distribution announces one, `PluginLoadError` where
    it cannot be imported or is none, `InvalidInputError` for what is no name.
    """
    checks.check_text("name", name)
    entries = [
        entry
        for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
        if entry.name == name
    ]
    if not entries and name.endswith(POOL):
        return in_pool(find_rig(name.removesuffix(POOL), model=model))
    if not entries and name.endswith(ISOLATED):
        return isolated(find_rig(name.removesuffix(ISOLATED), model=model))
    if not entries:
        raise BackendNotFoundError(
            f"no installed distribution announces a conformance rig for {name!r} (entry-point "
            f"group {ENTRY_POINT_GROUP}); choose from: {', '.join(rig_names()) or 'none'}",
            name=name,
            candidates=rig_names(),
        )
    rig = _loaded(entries[0], name)
    rig = rig if model is None else at(rig, model)
    rig.child = (name, model)
    return rig


def isolated(rig: Rig) -> Rig:
    """Return ``rig`` with the sessions of a pool whose engine is a process of its own.

    Raises `InvalidInputError` for a rig that names no path: another process must find the model.
    """
    if rig.path is None:
        raise checks.refuse("path", None, "a path in the rig, which another process can open")
    if rig.backend == "reference":
        reference.announce()
    other = in_pool(rig, ISOLATED)
    other.isolated = True
    return other


def in_pool(rig: Rig, suffix: str = POOL) -> Rig:
    """Return ``rig`` with the sessions of a pool."""
    variant = f"{rig.variant}{suffix}" if rig.variant else suffix.removeprefix("-")
    observe = rig.observe

    def observe_place(context: Any, seq_id: int) -> Observation:
        assert observe is not None  # noqa: S101  (only then it is used)
        return observe(*context.place) if isinstance(context, Placed) else observe(context, seq_id)

    changed = None if observe is None else observe_place
    pooled = attrs.evolve(rig, variant=variant, in_pool=True, observe=changed)
    if rig.child is not None:
        pooled.child = (rig.child[0] + suffix, rig.child[1])
    return pooled


def _loaded(entry: Any, name: str) -> Rig:
    distribution = getattr(entry.dist, "name", None)
    try:
        found = entry.load()
        rig = found() if callable(found) else found
    except infercore.InferCoreError:
        raise
    except Exception as error:
        raise PluginLoadError(
            f"the conformance rig {name!r} ({entry.value}) cannot be loaded: "
            f"{calls.described(error)}",
            plugin=name,
            distribution=distribution,
        ) from error
    if not isinstance(rig, Rig):
        raise PluginLoadError(
            f"the conformance rig {name!r} ({entry.value}) is a {type(rig).__name__}; make it an "
            "infercore.conformance.Rig, or a function that returns one",
            plugin=name,
            distribution=distribution,
        )
    return rig


def at(rig: Rig, path: str) -> Rig:
    """Return ``rig`` with the model at ``path`` in place of its own, and its tolerance.

    An encoder takes the place of the rig's encoder too; of a model that generates, no adapter is
    known. What is left behind with the rig's own model is no longer required.
    """
    with rig.open_at(path) as model:
        is_encoder = bool(model.info.has_encoder and not model.capabilities.logits_all)
        if is_encoder:
            own = rig.encoder is not None and os.path.exists(rig.encoder)
            is_own = own and os.path.samefile(path, str(rig.encoder))
            name = rig.encoder_name if is_own else None
            changes: dict[str, Any] = {"is_encoder": True, "encoder": path, "encoder_name": name}
        else:
            with model.new_context(**rig.fields(n_ctx=64)) as context:
                changes = {"tolerance": max(rig.tolerance, context.tolerance)}
    other = attrs.evolve(
        rig,
        open_model=lambda: rig.open_at(path),
        path=path,
        model_name=None,
        adapter=None,
        narrow=None,
        adapter_name=None,
        **changes,
    )
    lost = {"adapter", "adapters"} | ({"oracle"} if other.oracle_name() is None else set())
    if is_encoder and not rig.is_encoder:  # what a model that generates must honour
        lost |= {*REQUIREMENTS, *OPTIONS} - {"encoder"}
    other.require = tuple(name for name in rig.require if name not in lost)
    return other
