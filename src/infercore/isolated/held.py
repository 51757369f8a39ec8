"""A session that a worker holds for its program, and the frames of what its stream shows."""

from __future__ import annotations

import struct
import threading
from typing import TYPE_CHECKING, Any

import attrs

from infercore.errors import UnsupportedFeatureError
from infercore.isolated import wire
from infercore.isolated.replay import NotedSampler, Replay
from infercore.session.chat_stream import ChatStream
from infercore.session.pool_stream import PoolStream
from infercore.values.config import sampling_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infercore.isolated.replay import Position
    from infercore.session.generation import Shown
    from infercore.session.session import CoreSession
    from infercore.values.config import DecodeConfig


class Held:
    """A session, its open stream, and what was noted of that.

    ``on_replayed`` hears how many tokens were chosen again that another process had chosen.
    """

    def __init__(
        self, session: CoreSession, on_replayed: Callable[[int], object] | None = None
    ) -> None:
        self.session = session
        self._on_replayed = on_replayed
        self.lock = threading.Lock()
        self.stream: Any = None
        self.replay: Replay | None = None
        self.sampler: NotedSampler | None = None
        self.n_told = 0
        self.counts = 0, 0  # of the last stream that was ended, see `PoolStream.counts`
        self.number = self.cancelled_to = self.answered = 0
        self.in_lane: Any = 0, b""  # the last answer that went there
        self._asking = threading.Lock()
        session.was_cancelled = lambda: self.number < self.cancelled_to
        session.sample_through(self._new_sampler)

    def _new_sampler(
        self, make: Callable[[DecodeConfig], Any], config: DecodeConfig
    ) -> NotedSampler:
        sampling = sampling_of(config)
        if sampling.implementation == "native":
            raise UnsupportedFeatureError(
                feature="implementation='native'",
                backend=self.session.model.backend,
                hint="an engine's own sampler ends with its process; use 'portable', or open "
                "without isolate=True",
            )
        replay, self.replay = self.replay, None
        if replay is not None:
            seeded = attrs.evolve(sampling, seed=replay.seed)
            config = attrs.evolve(config, sampling=seeded)
        self.sampler = NotedSampler(make(config), replay, self._on_replayed)
        return self.sampler

    # -- streams -------------------------------------------------------------------------------

    def open(self, kind: str, args: Sequence[Any], fields: dict[str, Any], replay: Any) -> Any:
        """Begin a stream; with ``replay`` one that goes on behind what was shown before."""
        self.replay = None if replay is None else Replay(*replay)
        self.sampler, self.n_told = None, 0 if self.replay is None else len(self.replay.tokens)
        try:
            self.stream = getattr(self.session, kind)(*args, **fields)
            for _ in range(0 if replay is None else replay[-1]):
                next(self.stream, None)
        except BaseException:
            self.stream = None
            raise
        finally:
            self.replay = None
        return None if self.sampler is None else self.sampler.seed

    def next(self, item: Any = None) -> list[Any]:
        """Return the next chunk (None at the end), the tokens chosen meanwhile and the place.

        The decode's next ``item`` may be there already.
        """
        chunk = None if item is None else self._of_item(item)
        if chunk is None:
            chunk = next(self.stream, None)
        chosen, position = ([], None) if chunk is None else self.chosen()
        return [chunk, chosen, position]

    def text(self, item: Shown) -> list[Any] | None:
        """Return what `next` returns for text that is there; None where it takes more of it."""
        chunk = self._of_item(item)
        return None if chunk is None else [chunk, *self.chosen()]

    def _of_item(self, item: Any) -> Any:
        """Return the chunk that ``item`` of the decode makes, None where it takes more of them."""
        stream = self.stream
        source: Any = stream.source if isinstance(stream, ChatStream) else stream
        chunk = source.take_given(item)
        return chunk if source is stream else stream.shown(chunk)

    def chosen(self) -> tuple[list[int], Position | None]:
        """Return the tokens chosen since this was asked, and where the sampler stands."""
        sampler = self.sampler
        if sampler is None:
            return [], None
        (n, position), told = sampler.mark, self.n_told
        self.n_told = n
        return sampler.tokens[told:n], position

    @property
    def source(self) -> PoolStream | None:
        """What brings the stream's items, where those come by themselves."""
        source = self.stream.source if isinstance(self.stream, ChatStream) else self.stream
        return source if isinstance(source, PoolStream) else None

    def ask(self, number: int, given: Callable[[int, Any], object]) -> bool:
        """Ask the decode for its next item, and hand it to ``given`` once, with ``number``.

        False where it has to be begun, or is at its end: nothing was asked then.
        """
        source = self.source
        if source is None:
            return False
        awaited = [number]  # of this request alone: an earlier one may be called late

        def there() -> None:
            with self._asking:  # who was late may call for an item that was taken before
                if not awaited or source.is_empty:
                    return
                found = awaited.pop(), source.given()
            given(*found)

        return source.ask(there)

    def end(self) -> None:
        """Close the stream."""
        stream = self.forget()
        if stream is not None:
            stream.close()

    def forget(self) -> Any:
        """Have no stream any more; return the one that was open."""
        source = self.source
        if source is not None:
            self.counts = source.counts
        stream, self.stream = self.stream, None
        return stream


def answer_of_shown(held: Held, number: int, shown: Any) -> Any:
    """Make what was shown the session's; return its small frame, or the answer if it has none."""
    held.stream.own(shown)
    chosen, position = held.chosen()
    try:
        return wire.pack_chunk(number, shown[0], shown[1], chosen, position)
    except (ValueError, OverflowError, struct.error):
        return True, [shown.chunk(), chosen, position], None
