"""How large the window is that the core enforces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from infercore.errors import InvalidInputError, OutOfMemoryError
from infercore.values.memory import free_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from infercore.values.config import ContextConfig
    from infercore.values.info import MemoryPlan, ModelInfo

DEFAULT_N_CTX = 4096
_STEP = 64


@attrs.frozen(kw_only=True)
class Window:
    """``n_ctx`` tokens in all, ``n_ctx_seq`` for one sequence; ``shared`` by all or not."""

    n_ctx: int
    n_ctx_seq: int
    n_seq_max: int
    shared: bool


def resolve_n_ctx(config: ContextConfig, info: ModelInfo) -> int:
    """Return the window asked for: None = the smaller of 4096 and the trained one, 0 = trained.

    Raises `InvalidInputError` where the trained window is asked for and not known.
    """
    trained = info.n_ctx_train
    if config.n_ctx is None:
        return min(DEFAULT_N_CTX, trained) if trained > 0 else DEFAULT_N_CTX
    if config.n_ctx == 0 and trained <= 0:
        raise InvalidInputError(
            "n_ctx=0 asks for the trained window, but this model does not state one; give a number",
            field="n_ctx",
            value=0,
            allowed="at least 1",
        )
    return config.n_ctx or trained


def is_fit(config: ContextConfig) -> bool:
    """Whether the largest window that memory has room for is asked for."""
    n_ctx: object = config.n_ctx
    return n_ctx == "fit"


def fitted(
    config: ContextConfig, plan: Callable[[ContextConfig], MemoryPlan], *, is_loaded: bool
) -> ContextConfig:
    """Return ``config`` with the largest window up to the trained one that memory has room for.

    A tenth of what is free stays so. With ``is_loaded`` the weights are held already. Raises
    `OutOfMemoryError` where not even ``n_ctx_min`` tokens fit.
    """
    free, needs = _free(), _needs(config, plan, is_loaded=is_loaded)
    trained = plan(attrs.evolve(config, n_ctx=0)).n_ctx
    lowest = min(trained, max(config.n_ctx_min, config.n_seq_max or 1))
    if needs(trained) <= free:
        return attrs.evolve(config, n_ctx=trained)
    if needs(lowest) > free:
        raise OutOfMemoryError(
            f"not even a window of {lowest} tokens fits: it takes {needs(lowest):,} bytes and "
            f"{free:,} are free, less a reserve; give a smaller n_ctx_min, or free memory"
        )
    return attrs.evolve(config, n_ctx=_largest(lowest, trained, lambda n: needs(n) <= free))


def fitted_cells(
    config: ContextConfig,
    most: int,
    plan: Callable[[ContextConfig], MemoryPlan],
    *,
    is_loaded: bool,
) -> int:
    """Return how many cells, up to ``most``, memory has room for: at least a window's."""
    free, needs = _free(), _needs(config, plan, is_loaded=is_loaded)
    lowest = config.n_ctx or 1
    if most <= lowest or needs(most) <= free:
        return most
    return _largest(lowest, most, lambda n: needs(n) <= free)


def _free() -> int:
    return free_bytes() // 10 * 9


def _needs(
    config: ContextConfig, plan: Callable[[ContextConfig], MemoryPlan], *, is_loaded: bool
) -> Callable[[int], int]:
    def needs(n_ctx: int) -> int:
        found = plan(attrs.evolve(config, n_ctx=n_ctx))
        held = found.kv_bytes + found.compute_bytes
        return held if is_loaded else max(found.peak_bytes, found.total_bytes)

    return needs


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """Return about the largest number that fits; ``low`` does, ``high`` does not."""
    lowest = low
    while high - low > _STEP:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return max(lowest, low - low % _STEP)


def check_parts(n_ctx: int, n_seq_max: int | None, *, unified: bool | None) -> None:
    """Raise `InvalidInputError` where a window that is not shared has no token a sequence."""
    if unified is False and n_ctx < (n_seq_max or 1):
        raise InvalidInputError(
            f"n_ctx={n_ctx} gives {n_seq_max} sequences no tokens; give n_ctx={n_seq_max} or "
            "more, or kv_unified=True to share the window",
            field="n_ctx",
            value=n_ctx,
            allowed=f"at least n_seq_max={n_seq_max}",
        )


def window_of(n_ctx: int, effective: Mapping[str, Any]) -> Window:
    """Return the window to enforce for ``n_ctx`` asked and the engine's ``effective`` values.

    Raises `InvalidInputError` where that leaves a sequence no token.
    """
    n_seq_max = int(effective.get("n_seq_max") or 1)
    shared = n_seq_max == 1 or bool(effective.get("kv_unified"))
    check_parts(n_ctx, n_seq_max, unified=shared)
    return Window(
        n_ctx=n_ctx,
        n_ctx_seq=n_ctx if shared else n_ctx // n_seq_max,
        n_seq_max=n_seq_max,
        shared=shared,
    )
