"""The calls that a plugin's context may add, looked up once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from infercore.protocols.spi import EngineContext, FloatArray, TokenArray

    Ints = npt.NDArray[np.int32]
    Flags = npt.NDArray[np.bool_]


@attrs.frozen
class OptionalCalls:
    """What a context has beyond its capabilities' calls, None where it lacks one.

    See `infercore.protocols.spi` for what each of them does.
    """

    decode_one: Callable[..., None] | None
    decode_spans: Callable[[TokenArray, Ints, Ints, Flags], None] | None
    decode_vectors: Callable[[FloatArray, Ints, Ints, Flags], None] | None
    seq_pos_min: Callable[[int], int] | None
    clear: Callable[[], None] | None
    synchronize: Callable[[], None] | None
    warmup: Callable[[], None] | None
    set_causal_attention: Callable[[bool], None] | None
    set_control_vector: Callable[[FloatArray | None], None] | None
    set_abort_callback: Callable[[Callable[[], bool] | None], None] | None
    abort: Callable[[], None] | None
    clear_abort: Callable[[], None] | None
    native_handle: Callable[[], Any] | None
    sequence_size: Callable[[int], int] | None
    release_threads: Callable[[], object] | None
    shares_cells: bool
    takes_views: bool


def bind(inner: EngineContext) -> OptionalCalls:
    """Return the optional calls of ``inner``."""
    found: dict[str, Any] = {
        field.name: getattr(inner, field.name, None) for field in attrs.fields(OptionalCalls)
    }
    for name in ("shares_cells", "takes_views"):
        found[name] = bool(found[name])
    return OptionalCalls(**found)
