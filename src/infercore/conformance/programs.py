"""Programs: lists of calls drawn from a seed, run on a context and on an oracle beside it.

A program that fails is shortened while it still fails, and its text is in the failure. To run it
again:

>>> from infercore.conformance import find_rig, programs
>>> programs.run(find_rig("reference"), "n_batch=7; decode 0 12 3 last; remove 0 4 9; one 0 40")

Steps (``seq`` numbers a sequence, ``at`` a place in the rig's story that tokens are taken from):

=================================  ===============================================================
``decode seq n at mode``           ``n`` tokens, rows of the "last", of "all" or of "none"
``one seq at``                     one token, by ``decode_one``
``eval seq back n at``             ``n`` tokens in place of the last ``back`` ones
``batch qORDER wWANTED at``        one token for each digit of ORDER; rows where WANTED is 1
``spans qORDER sizes modes at``    a span for each digit of ORDER; sizes as 3,1,7, modes as l,a,n
``remove seq p0 p1``               ``seq_remove``
``copy src dst p0 p1``             ``seq_copy``
``keep seq``                       ``seq_keep``
``shift seq p0 p1 delta``          ``seq_shift``
``divide seq p0 p1 d``             ``seq_divide``
``save slot seq``                  ``save_sequence``, kept as ``slot``
``load slot seq``                  ``load_sequence``
``save_all slot``                  ``save_state``
``load_all slot``                  ``load_state``
``adapters percent``               the rig's adapter at that scale, 0 = none
``threads n``                      ``set_threads``, the same number for both
``embed on``                       ``set_embeddings``, 1 = on
``warm``                           ``warmup``
``clear``                          ``clear``
=================================  ===============================================================

A step that cannot be where it stands (after others were dropped) is passed over.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from infercore.conformance.expect import LawError, equal
from infercore.conformance.shadow import Shadow, spans_of
from infercore.errors import ContextOverflowError, UnsupportedFeatureError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from infercore.conformance.rig import Rig


class Ended(Exception):  # noqa: N818  (no error: nothing more can be tried)
    """A narrow cache that several sequences share has no room left, and said so."""


SHRINK_S = 20.0
"""How long a failing program is shortened at most."""

Step = tuple[Any, ...]


@attrs.frozen(kw_only=True)
class Program:
    """Fields of a context, and the steps to take in it."""

    fields: Mapping[str, Any]
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        fields = " ".join(f"{name}={json.dumps(value)}" for name, value in self.fields.items())
        return "; ".join([fields, *(" ".join(map(str, step)) for step in self.steps)])

    @classmethod
    def read(cls, text: str) -> Program:
        """Return the program whose text (``str(program)``) this is."""
        head, *lines = text.split(";")
        fields = dict(part.split("=", 1) for part in head.split())
        return cls(
            fields={name: json.loads(value) for name, value in fields.items()},
            steps=tuple(tuple(map(_word, line.split())) for line in lines),
        )


def _word(text: str) -> Any:
    is_number = text.lstrip("-").isdigit() and (len(text) == 1 or text[0] != "0")
    return int(text) if is_number else text


def run(rig: Rig, program: Program | str) -> None:
    """Run a program beside the oracle. Raises `LawError` at the first difference."""
    if isinstance(program, str):
        program = Program.read(program)
    context = rig.model.new_context(**rig.fields(**program.fields))
    try:
        runner = Runner(rig, context)
        for i, step in enumerate(program.steps):
            runner.take(step, f"step {i} ({' '.join(map(str, step))})")
    except Ended:
        return
    finally:
        context.close()


def check(rig: Rig, program: Program) -> None:
    """Run a program; where it fails, raise what the shortest one found raises, and say which.

    `LawError` has the program in its text; of other errors the rig notes it.
    """
    failure = _failure(rig, program)
    if failure is None:
        return
    program, failure = _shortened(rig, program, failure)
    again = f"to run it again: programs.run(rig, {str(program)!r})"
    if isinstance(failure, LawError):
        raise LawError(f"{failure}\n{again}") from failure
    rig.note(again)
    raise failure


def _failure(rig: Rig, program: Program) -> Exception | None:
    try:
        run(rig, program)
    except Exception as error:  # noqa: BLE001  (whatever a backend raises breaks the law)
        return error
    return None


def _shortened(rig: Rig, program: Program, failure: Exception) -> tuple[Program, Exception]:
    """Drop steps, in ever smaller pieces, as long as what is left fails too."""
    end = time.monotonic() + SHRINK_S
    size = len(program.steps) // 2
    while size and time.monotonic() < end:
        for start in range(len(program.steps) - size, -1, -size):
            steps = program.steps[:start] + program.steps[start + size :]
            shorter = attrs.evolve(program, steps=steps)
            found = _failure(rig, shorter)
            if found is not None:
                program, failure = shorter, found
            if time.monotonic() > end:
                break
        size //= 2
    return program, failure


class Runner:
    """A context and its shadow, which take the same steps."""

    def __init__(self, rig: Rig, context: Any) -> None:
        self._rig = rig
        self._context = context
        self._slots: dict[int, bytes] = {}
        info = rig.model.info
        self._forgets = bool(info.is_recurrent or info.is_hybrid or info.sliding_window)
        self.shadow = Shadow(rig, context)

    def take(self, step: Step, what: str) -> None:
        """Take one step on both sides, and compare all that can be seen."""
        name, *args = step
        if not self.shadow.allows(name, args):
            return
        try:
            self._on_context(name, args)
        except UnsupportedFeatureError:
            if self.shadow.may_refuse(name, args):
                return
            raise
        except ContextOverflowError as error:
            if error.stage == "engine" and self.shadow.is_narrow:
                raise Ended from error
            raise
        rows = self.shadow.take(name, args)
        self._compare_books(what)
        if rows is not None:
            equal(self._context.n_outputs, len(rows), f"{what}: rows")
            for i, row in enumerate(rows):
                if row is not None:
                    self._rig.near(self._context.logits(i), row, f"{what}: row {i}")

    def _compare_books(self, what: str) -> None:
        context = self._context
        for seq_id, past in enumerate(self.shadow.sequences):
            found = (
                context.n_past(seq_id),
                context.n_resident(seq_id),
                context.seq_pos_max(seq_id),
            )
            expected = (past.end, len(past.tokens), past.end - 1)
            where = f"{what}: of sequence {seq_id}, "
            equal(found, expected, f"{where}n_past, n_resident and last position")
            if not self._forgets:
                first = int(past.positions.min()) if len(past.tokens) else -1
                equal(context.seq_pos_min(seq_id), first, f"{where}first position")
            order = np.argsort(past.positions, kind="stable")
            equal(context.tokens(seq_id), past.tokens[order].tolist(), f"{where}tokens")

    def _on_context(self, name: str, args: list[Any]) -> None:
        own: Callable[..., None] | None = getattr(self, f"_{name}", None)
        if own is not None:
            own(*args)
        elif name == "clear":
            self._context.clear()
        else:
            getattr(self._context, f"seq_{name}")(*args)

    def _text(self, at: int, n: int) -> list[int]:
        return self._rig.story_at(at, n)

    def _decode(self, seq_id: int, n: int, at: int, mode: str) -> None:
        self._context.decode(self._text(at, n), seq_id=seq_id, logits=mode)

    def _one(self, seq_id: int, at: int) -> None:
        self._context.decode_one(self._text(at, 1)[0], seq_id=seq_id)

    def _eval(self, seq_id: int, back: int, n: int, at: int) -> None:
        self._context.eval(self._text(at, n), self._context.n_past(seq_id) - back, seq_id=seq_id)

    def _batch(self, order: str, wanted: str, at: int) -> None:
        seq_ids, flags = [int(s) for s in order[1:]], [flag == "1" for flag in wanted[1:]]
        tokens = self._text(at, len(seq_ids))
        entries = zip(tokens, seq_ids, flags, strict=True)
        self._context.decode_batch([(token, (seq_id,), flag) for token, seq_id, flag in entries])

    def _spans(self, order: str, sizes: str, modes: str, at: int) -> None:
        self._context.decode_spans(list(spans_of(self._rig, order, sizes, modes, at)))

    def _remove(self, seq_id: int, p0: int, p1: int) -> None:
        if self._context.seq_remove(seq_id, p0, p1) is not True:
            feature = f"seq_remove({seq_id}, {p0}, {p1})"
            raise UnsupportedFeatureError(feature=feature, backend=self._rig.backend)

    def _save(self, slot: int, seq_id: int) -> None:
        self._slots[slot] = self._context.save_sequence(seq_id)

    def _load(self, slot: int, seq_id: int) -> None:
        self._context.load_sequence(seq_id, self._slots[slot])

    def _save_all(self, slot: int) -> None:
        self._slots[slot] = self._context.save_state()

    def _load_all(self, slot: int) -> None:
        self._context.load_state(self._slots[slot])

    def _adapters(self, percent: int) -> None:
        self._context.set_adapters(self._rig.adapters_at(percent / 100))

    def _threads(self, n: int) -> None:
        self._context.set_threads(n, n)

    def _embed(self, on: int) -> None:
        self._context.set_embeddings(bool(on))

    def _warm(self) -> None:
        self._context.warmup()
