"""One generation in a thread of its own, so that Ctrl-C reaches it while the engine works."""

from __future__ import annotations

import queue
import signal
import threading
from typing import TYPE_CHECKING, Any

from infercore.cli.progress import PrefillBar
from infercore.errors import DecodeAbortedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from typing_extensions import Self

    from infercore import Session, StreamChunk

POLL_S = 0.05
EXIT_INTERRUPTED = 130


class Generation:
    """The chunks that ``begin`` gives, prefill included; a context manager to iterate within.

    The first Ctrl-C cancels in the engine: the stream ends as a cancelled one does, without a
    last chunk where it was still in the prompt, and ``interrupted`` is true. A second one raises
    `KeyboardInterrupt`. Leaving early (an error while writing, for instance) cancels as well.
    """

    def __init__(self, session: Session, begin: Callable[[], Iterable[StreamChunk]]) -> None:
        self.interrupted = False
        self._session = session
        self._begin = begin
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="infercore", daemon=True)
        self._bar = PrefillBar(session.explain_context)
        self._handler: Any = None

    def _work(self) -> None:
        end: BaseException | None = None
        try:
            for chunk in self._begin():
                self._items.put(chunk)
        except BaseException as error:  # noqa: BLE001  (raised in the thread that reads)
            end = error
        self._items.put(_End(end))

    def __enter__(self) -> Self:
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # a job in the background
        if threading.current_thread() is threading.main_thread() and not ignored:
            self._handler = signal.signal(signal.SIGINT, self._on_interrupt)
        self._thread.start()
        return self

    def _on_interrupt(self, *_: object) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True

    def __iter__(self) -> Iterator[StreamChunk]:
        while True:
            item = self._next()
            if isinstance(item, _End):
                if item.error is None or self._is_our_cancel(item.error):
                    return
                raise item.error
            yield item

    def _next(self) -> Any:
        while True:
            if self.interrupted:  # again each time: between two calls a cancel finds nothing
                self._session.cancel()
            try:
                item = self._items.get(timeout=POLL_S)
            except queue.Empty:
                self._bar.look()
            else:
                self._bar.end()
                return item

    def _is_our_cancel(self, error: BaseException) -> bool:
        return self.interrupted and isinstance(error, DecodeAbortedError)

    def __exit__(self, *_: object) -> None:
        try:
            self._bar.end()
            while self._thread.is_alive():  # left early, or about to end anyway
                self._session.cancel()
                self._thread.join(POLL_S)
        finally:
            if self._handler is not None:
                signal.signal(signal.SIGINT, self._handler)


class _End:
    """The end of the stream, with what ended it."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error
