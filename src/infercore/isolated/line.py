"""A worker's end of the line to its program: requests come, and the frames of answers go."""

from __future__ import annotations

import os
import struct
import threading
from collections import deque
from contextlib import suppress
from typing import Any

import attrs

from infercore.errors import InferCoreError
from infercore.isolated import wire
from infercore.isolated.board import Board
from infercore.session.handing import send_once
from infercore.values.session import StreamChunk

_N_OF_NEXT = 3
_MORE_OF_CHUNK = tuple(
    field.name for field in attrs.fields(StreamChunk) if field.name not in ("text", "tokens")
)


class Line:
    """The pipes to a program, and the page that it looks at."""

    def __init__(self, requests: int, answers: int, board: int, lane: int) -> None:
        self._requests = os.fdopen(requests, "rb")
        self._answers = answers
        self._lane = lane
        self._lock = threading.Lock()
        self._posted: deque[bytes] = deque()
        self.board = Board(board)

    def read(self) -> Any:
        """Return the next request."""
        return wire.read(self._take)

    def _take(self, n: int) -> bytes:
        data = self._requests.read(n)
        if len(data) < n:
            os._exit(0)  # the program that it works for is gone
        return data

    def send(self, answer: list[Any]) -> None:
        """Send an answer; where it cannot cross, the error that says so.

        With all others that this thread has for the program.
        """
        frame = frame_of_chunk(answer)
        try:
            frame = frame or wire.pack(answer, loose=True)
        except InferCoreError as error:
            frame = wire.pack([answer[0], False, error, None], loose=True)
        self.send_frame(frame)

    def send_frame(self, frame: bytes) -> None:
        """Send the frame of an answer."""
        self._posted.append(frame)
        send_once(self._send_posted)

    def send_in_lane(self, frame: bytes) -> None:
        """Send a small frame to who waits in the lane."""
        os.write(self._lane, frame)

    def _send_posted(self) -> None:
        """Send what is there; while another thread does so, it takes this along."""
        while self._posted and self._lock.acquire(blocking=False):
            try:
                self._write([self._posted.popleft() for _ in range(len(self._posted))])
            finally:
                self._lock.release()

    def _write(self, frames: list[bytes]) -> None:
        try:
            wire.write_all(self._answers, b"".join(frames))
        except OSError:  # the program is gone, and there is nobody here to see it
            os._exit(1)


def frame_of_chunk(answer: list[Any]) -> bytes | None:
    """Return the small frame of an ordinary chunk, which most answers are; None for others."""
    number, is_well, result, value = answer
    if value is not None or not is_well or type(result) is not list or len(result) != _N_OF_NEXT:
        return None
    chunk, chosen, position = result
    if type(chunk) is not StreamChunk or any(getattr(chunk, name) for name in _MORE_OF_CHUNK):
        return None
    with suppress(ValueError, OverflowError, struct.error):
        return wire.pack_chunk(number, chunk.text, chunk.tokens, chosen, position)
    return None
