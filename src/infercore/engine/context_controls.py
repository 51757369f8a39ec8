"""Live controls and counters of a context."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infercore.engine import arguments
from infercore.engine.context_abort import Aborting
from infercore.errors import UnsupportedFeatureError
from infercore.values import checks
from infercore.values.config import MAX_THREADS, AdapterSpec
from infercore.values.info import PerfCounters

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Controls(Aborting):
    """Threads, modes, adapters, warm-up and times."""

    def set_threads(self, n: int, n_batch: int | None = None) -> None:
        """Set the thread counts from now on; ``n_batch`` defaults to ``n``."""
        with self._gate:
            for field, value in (("n", n), ("n_batch", n if n_batch is None else n_batch)):
                if not checks.is_integer(value) or not 1 <= value <= MAX_THREADS:
                    raise checks.refuse(field, value, f"an integer from 1 to {MAX_THREADS}")
            self._need(
                "live_threads",
                declared=self.capabilities.live_threads,
                hint="give n_threads when opening the context",
            )
            self._judged(self._inner.set_threads, int(n), int(n if n_batch is None else n_batch))

    def set_embeddings(self, on: bool) -> None:  # noqa: FBT001  (the contract's signature)
        """Switch the output of embeddings on or off."""
        with self._gate:
            arguments.check_bool("on", on)
            self._need("embeddings", declared=self.capabilities.embeddings)
            self._judged(self._inner.set_embeddings, on)
            self._embeddings = on
            self._forget_outputs()

    def set_causal_attention(self, on: bool) -> None:  # noqa: FBT001
        """Switch between causal and bidirectional attention."""
        with self._gate:
            arguments.check_bool("on", on)
            own = getattr(self._inner, "set_causal_attention", None)
            if own is None:
                if on == self._causal:
                    return
                raise UnsupportedFeatureError(feature="set_causal_attention", backend=self._backend)
            self._judged(own, on)
            self._causal = on
            self._forget_outputs()

    def set_abort_callback(self, callback: Callable[[], bool] | None) -> None:
        """Ask ``callback`` while working; True aborts. None removes it.

        What it raises aborts the call that it was asked in and is raised by that. Where the
        engine cannot ask within a call, it is asked between calls of ``n_batch``.
        """
        with self._gate:
            if callback is not None and not callable(callback):
                raise checks.refuse("callback", callback, "a callable or None")
            asked = None if callback is None else self._guarded(callback)
            own = getattr(self._inner, "set_abort_callback", None)
            if own is not None:
                self._judged(own, asked)
            self._abort_callback = asked
            self._ask_before_step = asked is not None and own is None

    def _guarded(self, callback: Callable[[], bool]) -> Callable[[], bool]:
        """Return ``callback`` so that it never raises inside an engine: it aborts instead."""

        def ask() -> bool:
            try:
                return bool(callback())
            except BaseException as error:  # noqa: BLE001  (raised by the call that it stops)
                self._callback_error = error
                return True

        return ask

    def set_adapters(self, adapters: Sequence[AdapterSpec]) -> None:
        """Replace the whole list of LoRA adapters. Resident tokens were made with the old one."""
        with self._gate:
            self._need("lora", declared=self.capabilities.lora)
            chosen = tuple(checks.items("adapters", adapters, "AdapterSpec objects"))
            for adapter in chosen:
                if not isinstance(adapter, AdapterSpec):
                    raise checks.refuse("adapters", adapter, "AdapterSpec objects")
            self._judged(self._inner.set_adapters, chosen)
            self._forget_outputs()

    def warmup(self) -> None:
        """Touch weights and buffers once; what is resident stays, or it is refused."""
        with self._gate:
            own = getattr(self._inner, "warmup", None)
            if own is None:
                raise UnsupportedFeatureError(feature="warmup", backend=self._backend)
            self._forget_outputs()
            self._forget_late_abort()
            self._judged(own)

    def synchronize(self) -> None:
        """Wait until the engine has finished all queued work."""
        with self._gate:
            own = getattr(self._inner, "synchronize", None)
            if own is not None:
                self._judged(own)

    def perf(self) -> PerfCounters:
        """Return times and counts since the start or `reset_perf`."""
        with self._gate:
            self._need("perf", declared=self._timed, hint="open the context without no_perf=True")
            return PerfCounters(
                load_ms=self._load_ms,
                prefill_ms=self._prefill_s * 1e3,
                decode_ms=self._decode_s * 1e3,
                prefill_tokens=self._prefill_tokens,
                decode_tokens=self._decode_tokens,
                reused_tokens=self._reused_tokens,
            )

    def reset_perf(self) -> None:
        """Set all counters to zero."""
        with self._gate:
            self._zero_counters()

    def count_reused(self, n_tokens: int) -> None:
        """Add tokens that a session asked for and found resident to the counters."""
        self._reused_tokens += n_tokens
