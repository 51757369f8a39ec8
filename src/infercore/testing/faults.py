"""Lets chosen engine calls fail in chosen ways, while a test runs."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from infercore.errors import ContextOverflowError, DecodeAbortedError
from infercore.values import checks

if TYPE_CHECKING:
    from infercore.values.config import ContextConfig, SamplingConfig

CALLS = (
    "decode", "decode_one", "decode_batch", "decode_spans", "decode_vectors",
    "seq_remove", "seq_copy", "seq_shift", "seq_divide",
    "clear", "save_state", "load_state", "save_sequence", "load_sequence", "set_embeddings",
    "set_threads", "set_adapters", "encode", "warmup", "synchronize",
    "embedding", "embeddings", "logits", "n_past", "close",
    "sample", "observe", "reset", "clone",
)  # fmt: skip
WORK = ("nothing", "half", "all")
_DECODES = {"decode", "decode_batch", "decode_spans", "decode_vectors"}


@attrs.define
class _Plan:
    """The next ``times`` calls, after ``skip`` more, fail with ``error``."""

    error: BaseException
    work: str
    skip: int
    times: int

    def takes(self) -> bool:
        if self.skip > 0:
            self.skip -= 1
            return False
        self.times -= 1
        return self.times >= 0


class Faults:
    """What shall fail; the test may change it at any time.

    >>> faults = Faults()
    >>> faults.plan("decode", MemoryError(), at=2)    # the second decode from now on fails
    >>> faults.reset()

    ``calls`` counts the engine calls made, by name.
    """

    def __init__(self) -> None:
        self._plans: dict[str, _Plan] = {}
        self.calls: Counter[str] = Counter()

    def plan(
        self, call: str, error: BaseException, *, at: int = 1, work: str = "nothing", times: int = 1
    ) -> None:
        """Let the ``at``-th ``call`` from now on, and ``times`` in all, raise ``error``.

        ``work`` is what the engine does before: "nothing", "half" of the tokens (of a call that
        decodes several) or "all".
        """
        if call not in CALLS:
            raise checks.refuse("call", call, f"one of {', '.join(CALLS)}")
        if work not in WORK or (work == "half" and call not in _DECODES):
            raise checks.refuse("work", work, "'nothing' or 'all', for decodes also 'half'")
        self._plans[call] = _Plan(error, work, at - 1, times)

    def reset(self) -> None:
        """Let nothing fail any more, and count from zero."""
        self._plans.clear()
        self.calls.clear()

    def around(self, inner: Any) -> FaultyModel:
        """Return the `infercore.EngineModel` ``inner`` with these faults in its contexts."""
        return FaultyModel(inner, self)

    def run(self, name: str, method: Any, *args: Any, **kwargs: Any) -> Any:
        """Call an engine's method, and fail where that is planned."""
        self.calls[name] += 1
        plan = self._plans.get(name)
        if plan is None or not plan.takes():
            return method(*args, **kwargs)
        if plan.work == "half":
            _half(name, method, *args, **kwargs)
        elif plan.work == "all":
            method(*args, **kwargs)
        raise plan.error


def _half(name: str, method: Any, *args: Any, **kwargs: Any) -> None:
    """Do a decode with the first half of its tokens."""
    n = len(args[0]) // 2
    if not n:
        return
    if name == "decode":
        method(args[0][:n], **kwargs)
    else:
        method(*(arg[:n] for arg in args), **kwargs)


def no_room() -> ContextOverflowError:
    """Return what an engine raises that finds no room in mid-call."""
    return ContextOverflowError(stage="engine", resident_tokens=0, additional_tokens=1, n_ctx=1)


def aborted() -> DecodeAbortedError:
    """Return what an engine raises when it was asked to stop."""
    return DecodeAbortedError("the engine stopped", resident_tokens=0)


class FaultyModel:
    """An `EngineModel` whose contexts fail as planned."""

    def __init__(self, inner: Any, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def new_context(self, config: ContextConfig) -> FaultyContext:
        """Return a context that fails as planned."""
        return FaultyContext(self._inner.new_context(config), self._faults)

    def new_sampler(self, config: SamplingConfig) -> FaultySampler:
        """Return a native sampler that fails as planned."""
        return FaultySampler(self._inner.new_sampler(config), self._faults)


class FaultySampler:
    """An engine's own sampler that fails as planned."""

    def __init__(self, inner: Any, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return partial(self._faults.run, name, found) if name in CALLS else found

    def clone(self) -> FaultySampler:
        """Return an independent sampler with the same faults."""
        return FaultySampler(self._faults.run("clone", self._inner.clone), self._faults)


class FaultyContext:
    """An `EngineContext` that fails as planned."""

    def __init__(self, inner: Any, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return partial(self._faults.run, name, found) if name in CALLS else found
