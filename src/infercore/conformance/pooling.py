"""What laws about pools share: calls in many threads, and what reaches the engine."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.conformance.expect import LawError, that
from infercore.conformance.rig import generated
from infercore.session.observer import set_observer
from infercore.testing import engine_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Self

    from infercore.conformance.rig import Rig
    from infercore.session.observer import Step

PATIENCE_S = 60.0
"""How long calls of a pool are waited for."""
_N_MOVES = 64
"""Moves of the logits that are tried to tell a near tie from a wrong draw."""


def together(pool: Any, work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """Return ``work(item)`` of each, in a thread each, begun at once.

    Raises `LawError` where one does not end in time (the pool is closed then), or what it raised.
    """
    start = threading.Barrier(len(items))

    def begin(item: Any) -> Any:
        start.wait(PATIENCE_S)
        return work(item)

    with ThreadPoolExecutor(len(items)) as threads:
        calls = [threads.submit(begin, item) for item in items]
        left = wait(calls, PATIENCE_S).not_done
        if left:
            pool.close()
            raise LawError(f"{len(left)} of {len(items)} calls did not end in {PATIENCE_S:.0f} s")
    return [call.result() for call in calls]


def text_of(session: Any, prompt: str, n: int, **fields: Any) -> list[int]:
    """Return ``n`` tokens after ``prompt``, the likeliest unless ``fields`` say otherwise."""
    session.ensure_prefix(prompt)
    asked = {"max_tokens": n, "temperature": 0, "ignore_eos": True, **fields}
    return generated(list(session.decode(**asked)))


def follows_seed(
    rig: Rig, prompt: Sequence[int], tokens: Sequence[int], what: str, **fields: Any
) -> None:
    """Raise `LawError` unless ``tokens`` are those that this seed draws after ``prompt`` alone.

    The first that differs must be a near tie: a move of the logits within the tolerance draws it.
    """
    context, sampler = rig.context(), rig.sampler(ignore_eos=True, **fields)
    context.decode(prompt)
    sampler.observe(prompt)
    for i, token in enumerate(tokens):
        before, row = sampler.clone(), np.array(context.logits())
        if sampler.sample(_Row(row)) != token:
            moves = (_moved(row, rig.tolerance, move) for move in range(_N_MOVES))
            near = any(before.clone().sample(_Row(moved)) == token for moved in moves)
            that(near, f"{what}: token {i} is {token}, which this seed does not draw alone")
            return
        context.decode_one(token)


def _moved(row: Any, tolerance: float, seed: int) -> Any:
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], row.shape)
    return (row + tolerance * signs).astype(np.float32)


class _Row:
    """Stands for a context that has just this row."""

    n_outputs = 1

    def __init__(self, row: Any) -> None:
        self._row = row

    def logits(self, _: int = -1) -> Any:
        return self._row


class Calls:
    """Notes what the plugin's contexts are asked to evaluate, while a block runs.

    ``made`` has a mapping of sequences to numbers of tokens for each call. ``before`` is called
    ahead of each with that mapping: what it raises, the engine raises. Of an engine in another
    process it is noted how many sequences took part with how many tokens; laws that set ``before``
    are left.
    """

    NAMES = ("decode", "decode_one", "decode_batch", "decode_spans")

    def __init__(self, rig: Rig) -> None:
        context = rig.context()
        self._cls: Any = type(engine_of(context))
        context.close()
        self._rig = rig
        self._old: dict[str, Any] = {}
        self._inside = threading.local()
        self.made: list[dict[int, int]] = []
        self._before: Callable[[dict[int, int]], object] | None = None

    @property
    def before(self) -> Callable[[dict[int, int]], object] | None:
        """What is called ahead of each call."""
        return self._before

    @before.setter
    def before(self, value: Callable[[dict[int, int]], object] | None) -> None:
        if self._rig.isolated:
            self._rig.leave("the engine is in another process, where nothing is put before a call")
        self._before = value

    def on_step(self, step: Step) -> None:
        """Note a call that was made in another process."""
        n_prompts = step.n_sequences - step.n_running
        pieces = [1] * step.n_running + [0] * n_prompts
        if n_prompts:
            pieces[-1] = step.n_prompt
        self.made.append(dict(enumerate(pieces)))

    @property
    def n_tokens(self) -> int:
        """Tokens evaluated in all calls."""
        return sum(sum(call.values()) for call in self.made)

    def __enter__(self) -> Self:
        if self._rig.isolated:
            set_observer(self)
            return self
        for name in self.NAMES:
            old = getattr(self._cls, name, None)
            if old is not None:
                self._old[name] = vars(self._cls).get(name)
                setattr(self._cls, name, self._noting(name, old))
        return self

    def __exit__(self, *_: object) -> None:
        if self._rig.isolated:
            set_observer(None)
        for name, own in self._old.items():
            if own is None:
                delattr(self._cls, name)
            else:
                setattr(self._cls, name, own)

    def _noting(self, name: str, old: Callable[..., Any]) -> Callable[..., Any]:
        def noting(context: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "it", False):  # one call made of another
                return old(context, *args, **kwargs)
            self._inside.it = True
            try:
                spans = _spans_of(name, args, kwargs)
                self.made.append(spans)
                if self.before is not None:
                    self.before(spans)
                return old(context, *args, **kwargs)
            finally:
                self._inside.it = False

        return noting


def _spans_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, int]:
    """Return how many tokens of which sequence a call of the plugin's ``name`` evaluates."""
    if name in {"decode", "decode_one"}:
        return {int(kwargs.get("seq_id", 0)): 1 if name == "decode_one" else len(args[0])}
    spans: dict[int, int] = {}
    for ids in args[2]:
        seq_id = int(ids[0] if isinstance(ids, (tuple, list)) else ids)
        spans[seq_id] = spans.get(seq_id, 0) + 1
    return spans
