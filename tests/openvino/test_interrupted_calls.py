"""A Ctrl-C behind each of the engine's own calls: a context holds what it says that it holds.

Each call of a context is made again and again, and broken off behind its first native call, its
second, and so on, until it comes to its end.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import infercore as ic
import pack
from openvino import _pyopenvino as native

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

N_SEQ = 2
ATOL = 2e-3


class Interrupter:
    """Raises behind the ``n``-th native call from `arm` on."""

    def __init__(self) -> None:
        self.n: int | None = None
        self.came = False

    def arm(self, n: int) -> None:
        self.n, self.came = n, False

    def count(self, result: Any) -> Any:
        if self.n is not None:
            self.n -= 1
            if self.n == 0:
                self.n, self.came = None, True
                raise KeyboardInterrupt
        return result

    def behind(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **fields: self.count(function(*args, **fields))


@pytest.fixture
def interrupter(monkeypatch: pytest.MonkeyPatch) -> Interrupter:
    """Count the calls of the engine that contexts make."""
    found = Interrupter()
    for cls in (native.InferRequest, native.CompiledModel, native.VariableState, native.Tensor):
        for name, member in list(vars(cls).items()):
            if isinstance(member, property):
                parts = (member.fget, member.fset)
                wrapped: Any = property(*(part and found.behind(part) for part in parts))
            elif callable(member) and name[0] != "_" and name not in ("start_async", "wait"):
                wrapped = found.behind(member)  # the two that are left out begin and end a step
            else:
                continue
            monkeypatch.setattr(cls, name, wrapped)
    return found


A, B = list(range(20, 33)), list(range(60, 69))
CALLS: dict[str, Any] = {
    "prefill": lambda c, _: c.decode(B, logits="all"),
    "decode_one": lambda c, _: c.decode_one(7),
    "eval": lambda c, _: c.eval(B, 5),
    "batch": lambda c, _: c.decode_batch([(5, (0,), True), (6, (1,), True)]),
    "spans": lambda c, _: c.decode_spans([(0, B, "last"), (1, B[:3], "last")]),
    "save": lambda c, _: (c.save_state(), c.save_sequence(0)),
    "load": lambda c, saved: c.load_state(saved["state"]),
    "load_sequence": lambda c, saved: c.load_sequence(0, saved["sequence"]),
    "remove": lambda c, _: c.seq_remove(0, 3, 6),
    "remove_end": lambda c, _: c.seq_remove(0, 6),
    "copy": lambda c, _: c.seq_copy(0, 1),
    "copy_part": lambda c, _: c.seq_copy(0, 1, 0, 5),
    "shift": lambda c, _: c.seq_shift(0, 4, -1, 3),
    "clear": lambda c, _: c.clear(),
    "embed": lambda c, _: (c.set_embeddings(True), c.decode(B), c.embeddings()),
    "set_threads": lambda c, _: c.set_threads(1),
    "warmup": lambda c, _: c.warmup(),
}
OF_THE_ENGINE = ("prefill", "decode_one", "eval", "batch", "spans", "embed", "warmup")
MAY_END_IT = ()
OF_SEVERAL = ("batch", "spans", "copy", "copy_part", "shift")  # what the stateful form refuses


def rows(context: Any, seq_id: int) -> tuple[list[int], Any]:
    """Return the tokens of a sequence and the row behind one more; its positions agree."""
    tokens = context.tokens(seq_id)
    assert len(tokens) == context.n_resident(seq_id)
    context.decode_one(9, seq_id=seq_id)
    return tokens, context.logits().copy()


@pytest.mark.parametrize("name", CALLS)
def test_a_context_holds_what_it_says(
    open_context: Callable[..., Any], interrupter: Interrupter, form: str, name: str
) -> None:
    if form == "stateful" and name in OF_SEVERAL:
        return
    fields = {"n_ctx": 96, "n_threads": 1, "n_threads_batch": 1, "form": form}
    fields["n_seq_max"] = N_SEQ if form == "paged" else 1
    fresh = open_context(**{**fields, "n_seq_max": 1, "form": "paged"})
    other = open_context(**fields)
    other.decode(B)
    saved = {"state": other.save_state(), "sequence": other.save_sequence(0)}
    context, n, n_fatal = open_context(**fields), 0, 0
    while True:
        n += 1
        if context.closed:
            context = open_context(**fields)
        context.clear()
        context.decode(A)
        try:
            interrupter.arm(n)
            CALLS[name](context, saved)
        except KeyboardInterrupt:
            pass
        finally:
            interrupter.n = None
        for seq_id in range(context.n_seq_max):
            try:
                n_past, (tokens, row) = context.n_past(seq_id), rows(context, seq_id)
            except ic.SessionFatalError:
                context.close()
                n_fatal += 1
                break
            if n_past == len(tokens):  # nothing was moved
                fresh.clear()
                fresh.decode([*tokens, 9])
                assert np.abs(row - fresh.logits()).max() < ATOL, (n, seq_id, tokens)
        if not interrupter.came:
            break
    assert n > 1 or name not in OF_THE_ENGINE
    assert n_fatal == 0 or name in MAY_END_IT


@pytest.fixture
def encoder() -> Iterator[Any]:
    pack.need_backend("openvino")
    import infercore_models

    with ic.load_model(infercore_models.path("encoder", "openvino"), backend="openvino") as model:
        yield model


def test_an_encoder_goes_on(encoder: Any, interrupter: Interrupter) -> None:
    fields = {"n_ctx": 64, "pooling_type": "mean", "n_threads": 1, "n_threads_batch": 1}
    with encoder.new_context(**fields) as context, encoder.new_context(**fields) as fresh:
        fresh.encode(A)
        expected, n = fresh.embedding().copy(), 0
        while True:
            n += 1
            try:
                interrupter.arm(n)
                context.encode(B)
            except KeyboardInterrupt:
                with pytest.raises(ic.OutputNotAvailableError):
                    context.embedding()
            finally:
                interrupter.n = None
            came = interrupter.came
            context.encode(A)
            np.testing.assert_allclose(context.embedding(), expected, atol=1e-5)
            if not came:
                break
        assert n > 1


def test_while_single_tokens_change_their_sequence(open_context: Callable[..., Any]) -> None:
    fields = {"n_ctx": 96, "n_threads": 1, "n_seq_max": N_SEQ, "form": "paged"}
    context, fresh = (open_context(**fields) for _ in range(2))
    left = 0

    def interrupt(frame: Any, event: str, _: Any) -> None:
        nonlocal left
        if event == "c_return" and frame.f_code.co_name == "_write_blocks":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    for n in range(1, 20):
        for one in (context, fresh):
            one.clear()
            one.decode_spans([(0, A, "last"), (1, B, "last")])
            one.decode_one(7)
        left = n
        sys.setprofile(interrupt)
        try:
            context.decode_one(8, seq_id=1)
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        for one in (context, fresh):
            one.decode_one(9)
        assert np.abs(context.logits() - fresh.logits()).max() < ATOL, n
        if left > 0:
            break
    assert n > 1
