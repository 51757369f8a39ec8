"""Frames between a program and its worker, which may be corrupt."""

from __future__ import annotations

import contextlib
import io
import json
import random
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import infercore as ic
from infercore.isolated import wire

if TYPE_CHECKING:
    from pathlib import Path


def there_and_back(value: Any, **options: Any) -> Any:
    return wire.read(taking(wire.pack(value, **options)))


def taking(data: bytes) -> Any:
    file = io.BytesIO(data)

    def take(n: int) -> bytes:
        found = file.read(n)
        if len(found) < n:
            raise EOFError
        return found

    return take


VALUES = [
    [None, True, 1, -2.5, "text \ud800 \x00", b"\x00\xff", (1, [2, (3,)])],
    {"a": {1: -float("inf"), ("b",): float("inf")}},
    ic.SamplingConfig(seed=4, logit_bias={3: -float("inf")}),
    ic.DecodeConfig(max_tokens=3, stop="x", sampling="model"),
    ic.ContextConfig(n_ctx=64, type_k=ic.KVType("fp8"), n_threads=2),
    ic.PoolConfig(n_parallel=2, context=ic.ContextConfig(n_ctx=64)),
    ic.PrefixInput(tokens=[1, 2, 3]),
    ic.Message(role="user", content="hello"),
    ic.ToolCall(id="1", name="f", arguments={"x": [1, None]}),
    ic.StreamChunk(text="a", tokens=(1, 2), logprobs=(ic.TokenLogprob(token=1, logprob=-0.5),)),
    ic.PoolStats(n_open=3, step_ms=1.5),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_come_back_as_they_were(value: Any) -> None:
    back = there_and_back(value)
    assert back == value
    assert type(back) is type(value)


def test_arrays_are_numbers_alone() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.array_equal(there_and_back(array), array)
    with pytest.raises(ic.UnsupportedFeatureError):
        wire.pack(np.array([object()]))


def test_errors_keep_their_types_and_facts() -> None:
    cause = MemoryError("none left")
    for error in (
        ic.ContextOverflowError(stage="engine", resident_tokens=1, additional_tokens=2, n_ctx=3),
        ic.SessionFatalError("gone", cause=cause),
        ic.InvalidInputError("no", field="x", value=object(), allowed=(1, 2)),
        ValueError("plain"),
    ):
        back = there_and_back([error], loose=True)[0]
        assert type(back) is type(error)
        assert str(back) == str(error)
        if isinstance(error, ic.ContextOverflowError):
            assert (back.state_after, back.n_ctx) == ("partial", 3)
        if isinstance(error, ic.SessionFatalError):
            assert isinstance(back.cause, MemoryError)


class Own:
    """A class that only this process knows."""


def test_what_cannot_cross_is_named() -> None:
    with pytest.raises(ic.UnsupportedFeatureError, match="processors"):
        wire.pack(ic.DecodeConfig(processors=[print]))
    with pytest.raises(ic.UnsupportedFeatureError, match="a Own"):
        wire.pack({"x": Own()})
    assert isinstance(there_and_back(Own(), loose=True), str)


def test_a_worker_ends_nobody_else() -> None:
    plain = {"$e": "SystemExit", "args": [], "facts": {}, "cause": None}
    text = json.dumps(plain).encode()
    found = wire.read(taking(struct.pack("<II", len(text), 0) + text))
    assert type(found) is RuntimeError


@pytest.mark.parametrize(
    "plain",
    [
        {"$v": "Popen", "f": {}},
        {"$v": "StreamChunk", "f": {"text": 1, "no": 2}},
        {"$e": "SystemExit", "args": 5, "facts": {}, "cause": None},
        {"$b": 7},
        {"$a": 0, "s": [1], "k": "|O"},
        {"$x": 1},
        [1],
        {},
    ],
    ids=str,
)
def test_no_value_of_ours_is_a_frame_error(plain: Any) -> None:
    text = json.dumps(plain).encode()
    with pytest.raises(wire.FrameError):
        wire.read(taking(struct.pack("<II", len(text), 0) + text))


def test_damaged_frames_are_frame_errors_or_too_short() -> None:
    rng = random.Random(0)
    whole = wire.pack([1, True, ic.StreamChunk(text="abc", tokens=(1,)), b"xyz"])
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        with contextlib.suppress(wire.FrameError, EOFError):
            wire.read(taking(bytes(data[: rng.randint(1, len(data))])))


def holding_itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    "value",
    [holding_itself(), 10**5000, -(10**5000), [b"x"] * (2**16 + 1)],
    ids=["holds itself", "digits", "less than nothing", "parts"],
)
def test_what_is_too_large_is_refused_before_it_crosses(value: Any) -> None:
    with pytest.raises(ic.InvalidInputError):
        wire.pack([1, 0, "generate", [], {"response_format": value}])


def test_numbers_of_numpy_cross_as_numbers() -> None:
    frame = wire.pack([np.int64(3)] * (2**16 + 1))
    assert wire.read(taking(frame)) == [3] * (2**16 + 1)


@pytest.mark.parametrize("position", [None, (2**128 - 1, 5.25)])
def test_a_small_frame_of_a_chunk(position: Any) -> None:
    given = (2**40, " \u00e4\U0001f600", (7, 2**31), [7, 2**31, 9], position)
    data = wire.read(taking(wire.pack_chunk(*given)))
    assert wire.chunk_of(data) == given
    whole = len(data) - len(given[1].encode())
    for n in range(whole):
        with pytest.raises(wire.FrameError):
            wire.chunk_of(data[:n])
    assert wire.next_of(wire.read(taking(wire.pack_next(3, 2**33)))) == (3, 2**33, False)


@pytest.mark.parametrize(
    ("text", "tokens", "position"),
    [("\ud800", (1,), None), ("a", (-1,), None), ("a", (1,), (2**128, 0.0))],
)
def test_what_has_no_room_in_a_small_frame(text: str, tokens: Any, position: Any) -> None:
    with pytest.raises((ValueError, OverflowError, struct.error)):
        wire.pack_chunk(1, text, tokens, tokens, position)


def test_a_large_answer_is_held_once(tmp_path: Path) -> None:
    size = 3 * 2**20 + 7
    path = tmp_path / "answer"
    path.write_bytes(b"a" * size + b"next")
    with path.open("rb") as file:
        answers = wire.Input(file.fileno(), lambda: None)
        assert answers.take(size) == b"a" * size
        assert not answers._data
        assert answers.take(4) == b"next"
        with pytest.raises(EOFError):
            answers.take(1)
