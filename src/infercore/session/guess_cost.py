"""What a guess costs: the time of one more token in a call, in steps of one token.

Measured once for a model with its settings on a machine, and kept in the user's cache folder: what
follows from it, which tokens are guessed, must not change from run to run.
"""

from __future__ import annotations

import contextlib
import platform
import threading
import time
from typing import TYPE_CHECKING, Any

from infercore.engine import digest
from infercore.errors import InferCoreError
from infercore.values.manifest import hash_json, kv_options

if TYPE_CHECKING:
    from collections.abc import Callable

FILE = "guesses.json"
UNKNOWN = 1.0
_N_CTX = 64
_N_START = 8
_N_GUESSES = 4
_N_ROUNDS = 4
_lock = threading.Lock()
_memory: dict[str, float] = {}


def guess_cost(model: Any, context: Any) -> float:
    """Return the steps that a guess costs in ``context``: about 0.1 where memory is the limit.

    The first time it opens a small context for a moment. `UNKNOWN` where that fails: then no guess
    pays.
    """
    key = _key(model, context)
    with _lock:
        if key not in _memory:
            found = _recalled(key)
            if found is None:
                found = _measured(model, context)
                if found is None:  # no memory now, perhaps later
                    return UNKNOWN
                found = _kept(key, found)
            _memory[key] = found
        return _memory[key]


def _key(model: Any, context: Any) -> str:
    effective = context.effective
    threads = [effective.get(name) for name in ("n_threads", "n_threads_batch")]
    return hash_json(
        {
            "model": model.digest,
            "backend": [model.backend, model.backend_version],
            "options": kv_options(effective),
            "threads": threads,
            "machine": [platform.machine(), platform.processor(), platform.node()],
        }
    )


def _recalled(key: str) -> float | None:
    try:
        return float(digest.recall(FILE, key) or "")
    except ValueError:
        return None


def _kept(key: str, cost: float) -> float:
    digest.store(FILE, key, f"{cost:.4g}")
    return float(f"{cost:.4g}")


def _measured(model: Any, context: Any) -> float | None:
    config = context.config
    fields = {
        name: getattr(config, name)
        for name in (
            "n_threads", "n_threads_batch", "flash_attn", "precision", "type_k", "type_v",
            "offload_kqv", "op_offload", "backend_options",
        )
    }  # fmt: skip
    tokens = list(range(_N_START))
    try:
        with contextlib.closing(model.new_context(n_ctx=_N_CTX, **fields)) as small:
            small.decode(tokens)
            guesses = tokens[: 1 + _N_GUESSES]
            one = _best(lambda: small.decode(tokens[:1]))
            more = _best(lambda: _guess(small, guesses))
    except InferCoreError:
        return None
    return min(UNKNOWN, max(0.01, (more / one - 1) / _N_GUESSES))


def _guess(context: Any, tokens: list[int]) -> None:
    """Evaluate tokens and take all but the first back, as where every guess is wrong."""
    context.decode(tokens, logits="all")
    context.seq_remove(0, context.n_past() - _N_GUESSES, -1)


def _best(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest of some rounds, after one that does not count."""
    found = []
    for _ in range(1 + _N_ROUNDS):
        begun = time.perf_counter()
        work()
        found.append(time.perf_counter() - begun)
    return min(found[1:])
