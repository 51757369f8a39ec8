"""Tables that cost a walk over the vocabulary, made once for each tokenizer object."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Concatenate, Generic, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from infercore.protocols.public import Tokenizer

P = ParamSpec("P")
T = TypeVar("T")


class PerTokenizer(Generic[P, T]):
    """Calls ``make(tokenizer, *args)`` once for each tokenizer and arguments; threads may share it.

    Tokenizers are told apart by identity and held weakly. One that cannot be referred to weakly
    gets its tables made anew each time.
    """

    def __init__(self, make: Callable[Concatenate[Tokenizer, P], T]) -> None:
        self._make = make
        self._known: dict[int, tuple[weakref.ref[Tokenizer], dict[object, T]]] = {}
        self._lock = threading.RLock()

    def __call__(self, tokenizer: Tokenizer, /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what ``make`` returned for these."""
        key = (args, tuple(sorted(kwargs.items())))
        with self._lock:
            tables = self._tables(tokenizer)
            if key not in tables:
                tables[key] = self._make(tokenizer, *args, **kwargs)
            return tables[key]

    def _tables(self, tokenizer: Tokenizer) -> dict[object, T]:
        number = id(tokenizer)
        known = self._known.get(number)
        if known is not None and known[0]() is tokenizer:
            return known[1]
        tables: dict[object, T] = {}
        try:
            reference = weakref.ref(tokenizer, lambda ref: self._forget(number, ref))
        except TypeError:
            return tables
        self._known[number] = (reference, tables)
        return tables

    def _forget(self, number: int, reference: weakref.ref[Tokenizer]) -> None:
        with self._lock:
            if number in self._known and self._known[number][0] is reference:
                del self._known[number]
