"""What to give up, step by step, when memory does not suffice for a context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from infercore.errors import OutOfMemoryError
from infercore.values.config import QUANTISED_KV_TYPES
from infercore.values.memory import free_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from infercore.protocols.spi import EngineContext
    from infercore.values.config import ContextConfig
    from infercore.values.info import Capabilities, MemoryPlan

_EIGHT_BITS = ("q8_0", "u8")  # the same size by another layout; a backend has one of them
_SMALLER = {"f32": ("f16",), "f16": _EIGHT_BITS, "bf16": _EIGHT_BITS, "q8_0": ("q4_0",)}
_MIN_UBATCH = 64
_LARGE_WINDOW = 1 << 20
_SHARE_OF_FREE = 0.9


@attrs.frozen(kw_only=True)
class Attempt:
    """One try to allocate a context: what was asked for and how it ended (None = it worked)."""

    n_ctx: int
    n_ubatch: int | None
    type_k: str | None
    type_v: str | None
    error: str | None = None


def allocate(
    make: Callable[[ContextConfig], EngineContext],
    config: ContextConfig,
    kinds: Capabilities,
    plan: Callable[[ContextConfig], MemoryPlan] | None = None,
) -> tuple[EngineContext, ContextConfig, Sequence[Attempt]]:
    """Return the first context of the ladder that fits, its config and the attempts made.

    ``plan`` says what a context takes of this machine's own memory. Raises `OutOfMemoryError`
    with all attempts.
    """
    attempts: list[Attempt] = []
    for candidate in _candidates(config, kinds):
        try:
            if plan is not None:
                _check_room(plan, candidate)
            inner = make(candidate)
        except MemoryError as error:  # noqa: PERF203  (each step is tried on its own)
            attempts.append(_attempt(candidate, str(error) or type(error).__name__))
            last = error
        else:
            return inner, candidate, (*attempts, _attempt(candidate, None))
    tries = f"{len(attempts)} attempt{'s' * (len(attempts) != 1)}"
    raise OutOfMemoryError(
        f"not enough memory for this context after {tries}; the last said: {last}; "
        "give a smaller n_ctx, or on_oom='shrink'",
        attempts=attempts,
    ) from last


def _check_room(plan: Callable[[ContextConfig], MemoryPlan], config: ContextConfig) -> None:
    """Refuse what an engine would be granted now and the process be ended for once it is filled.

    A ladder leaves a part of the memory to what no plan counts.
    """
    shrinks = config.on_oom == "shrink"
    if not shrinks and (config.n_ctx or 0) < _LARGE_WINDOW:
        return  # what fails there fails at once, and a plan may take as long as the context
    free, found = free_bytes(address_space=False), plan(config)
    n_bytes, room = found.kv_bytes + found.compute_bytes, free
    if shrinks:
        room = int(free * _SHARE_OF_FREE)
    if n_bytes > room:
        raise OutOfMemoryError(
            f"a context of n_ctx={config.n_ctx} takes {n_bytes:,} bytes and {free:,} are free"
        )


def _attempt(config: ContextConfig, error: str | None) -> Attempt:
    return Attempt(
        n_ctx=config.n_ctx or 0,
        n_ubatch=config.n_ubatch,
        type_k=config.type_k,
        type_v=config.type_v,
        error=error,
    )


def _candidates(config: ContextConfig, kinds: Capabilities) -> Iterator[ContextConfig]:
    """Yield ``config``, then with a smaller n_ubatch, a smaller KV type, half windows."""
    yield config
    if config.on_oom != "shrink":
        return
    n_ubatch = config.n_ubatch or 512
    while n_ubatch > _MIN_UBATCH:
        n_ubatch //= 2
        config = attrs.evolve(config, n_ubatch=n_ubatch)
        yield config
    if types := _smaller_types(config, kinds):
        config = attrs.evolve(config, **types)
        yield config
    n_ctx = config.n_ctx or 0
    lowest = max(config.n_ctx_min, config.n_seq_max or 1)
    while n_ctx // 2 >= lowest:
        n_ctx //= 2
        config = attrs.evolve(config, n_ctx=n_ctx)
        yield config


def _smaller_types(config: ContextConfig, kinds: Capabilities) -> dict[str, Any]:
    """Return the smaller of type_k and type_v, each where the engine has it.

    Equal types step together or not at all: there are models that keep K and V as one.
    """
    asked = {"type_k": config.type_k or "f16", "type_v": config.type_v or "f16"}
    smaller = {
        name: next((each for each in _SMALLER.get(kind, ()) if each in kinds.kv_types), None)
        for name, kind in asked.items()
    }
    if config.flash_attn == "off" and smaller["type_v"] in QUANTISED_KV_TYPES:
        smaller["type_v"] = None
    found = {name: kind for name, kind in smaller.items() if kind}
    together = asked["type_k"] == asked["type_v"]
    return {} if together and len(found) < len(asked) else found
