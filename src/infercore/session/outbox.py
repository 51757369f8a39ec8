"""What a step made for its readers, handed over at its end."""

from __future__ import annotations

import threading
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING

from infercore.session.generation import Shown
from infercore.session.handing import gathering
from infercore.session.jobs import Item

if TYPE_CHECKING:
    from infercore.session.jobs import Generating

    Given = list[tuple[Generating, int | Shown | Item]]


class Outbox:
    """Keeps items until all of a step are there, and hands them over in their order.

    To wake a reader takes about as long as to choose a token. So where there are several, a thread
    of its own wakes them, while the engine evaluates the next step.
    """

    def __init__(self) -> None:
        self._given: Given = []
        self._sent: SimpleQueue[Given | None] = SimpleQueue()
        self._courier: threading.Thread | None = None
        self._n_sent = 0
        self._n_delivered = 0
        self._ended = False
        self._lock = threading.RLock()  # once the owner has ended, whoever calls sends refusals

    def show(self, job: Generating, token: int) -> None:
        """Give the reader of ``job`` the text of ``token``, at the end of the step.

        Where nothing depends on the text, it is made by who wakes the reader.
        """
        generation = job.generation
        if generation.shows_later and job.shift_from is None:
            job.n_given += 1
            self._given.append((job, token))
            return
        shown = generation.show(token)
        if shown is None:
            return
        if job.cuts:
            self.give(job, Item(shown.chunk()))
            return
        job.n_given += 1
        self._given.append((job, shown))

    def give(self, job: Generating, item: Item) -> None:
        """Give the reader of ``job`` an item at the end of the step."""
        item.cuts = job.take_cuts()
        job.n_given += 1
        with self._lock:
            self._given.append((job, item))

    def send(self) -> None:
        """Let the readers have what was made for them; for the owner of the jobs."""
        if not self._given:
            return
        with self._lock:
            given, self._given = self._given, []
            is_late = self._n_delivered != self._n_sent or (len(given) > 1 and self._has_courier())
            if is_late and not self._ended:
                self._n_sent += 1
                self._sent.put(given)
                return
        self._deliver(given)

    def close(self) -> None:
        """Wait until all is handed over; what comes later is so at once."""
        with self._lock:
            self._ended = True
            courier, self._courier = self._courier, None
        if courier is not None:
            self._sent.put(None)
            courier.join()

    def _has_courier(self) -> bool:
        """Whether a thread delivers; it is started where it can be."""
        if self._courier is None and not self._ended:
            courier = threading.Thread(target=self._run, name="infercore-outbox", daemon=True)
            with suppress(RuntimeError):  # no thread is to be had, or the interpreter ends
                courier.start()
                self._courier = courier
        return self._courier is not None

    def _run(self) -> None:
        while True:
            given = self._sent.get()
            if given is None:
                return
            try:
                self._deliver(given)
            finally:
                self._n_delivered += 1
                del given  # while it waits, it keeps no generation alive

    def _deliver(self, given: Given) -> None:
        with gathering():
            for job, made in given:
                try:
                    item = made if type(made) is Shown else _made(job, made)
                    if item is None:
                        continue
                    job.items.put(item)
                    if job.on_item is not None:
                        job.on_item()
                except Exception:  # noqa: BLE001  (the others' readers still wait)
                    job.cancelled = True


def _made(job: Generating, made: int | Shown | Item) -> Shown | Item | None:
    """Return what the reader of ``job`` gets for a token or an item; None where it has no text."""
    try:
        if isinstance(made, Item):
            if made.make is not None:
                made.chunk = made.make()
            return made
        shown = job.generation.show(made) if isinstance(made, int) else made
    except Exception as error:  # noqa: BLE001  (it is the reader's to see)
        job.cancelled = True
        return Item(error=error, final=True)
    if shown is None:
        job.n_unshown += 1
        if job.rests:  # it looked as if it were ahead of its reader
            job.on_change(job)
    return shown
