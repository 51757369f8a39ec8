"""Removing, copying, moving: what a context holds, and where."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from infercore.engine import arguments
from infercore.engine.context_abort import Aborting
from infercore.errors import (
    InferCoreError,
    InvalidPositionError,
    UnsupportedFeatureError,
)
from infercore.values import checks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

T = TypeVar("T")


class Sequences(Aborting):
    """Queries and changes of sequences."""

    def n_past(self, seq_id: int = 0) -> int:
        """Return the next position of the sequence, as the engine has it."""
        with self._gate:
            return self._position(self._sequence(seq_id))

    def n_resident(self, seq_id: int = 0) -> int:
        """Return how many tokens the sequence holds."""
        with self._gate:
            return self._cells.length(self._sequence(seq_id))

    def n_free(self, seq_id: int = 0, *, keep: int | None = None) -> int:
        """Return how many more tokens fit: into the shared window, or the sequence's own.

        ``keep``: as it would be once the sequence's tokens from that position on were removed.
        """
        with self._gate:
            return self.look_free(self._sequence(seq_id), keep)

    def look_free(self, seq_id: int, keep: int | None = None) -> int:
        """Return `n_free` without waiting for a call that runs: for reports."""
        return self._room(seq_id) + (0 if keep is None else self._given_back(seq_id, keep))

    @property
    def n_outputs(self) -> int:
        """How many output rows there are now."""
        return self._outputs.count

    @property
    def n_engine_outputs(self) -> int:
        """How many of them an engine's own sampler can read: none once they were restored."""
        return self._outputs.count if self._outputs.in_engine else 0

    @property
    def output_serial(self) -> int:
        """A number that changes whenever the output rows do."""
        return self._outputs.serial

    def tokens(self, seq_id: int = 0) -> list[int]:
        """Return the ids of the tokens that the sequence holds, in order."""
        with self._gate:
            return self._cells.tokens(self._sequence(seq_id))

    def seq_pos_min(self, seq_id: int = 0) -> int:
        """Return the first position held, -1 when empty."""
        with self._gate:
            seq_id = self._sequence(seq_id)
            own = getattr(self._inner, "seq_pos_min", None)
            if own is not None:
                return int(self._judged(own, seq_id))
            return next(iter(self._cells.positions(seq_id)), -1)

    def seq_pos_max(self, seq_id: int = 0) -> int:
        """Return the last position held, -1 when empty."""
        with self._gate:
            return self._position(self._sequence(seq_id)) - 1

    # -- removing ------------------------------------------------------------------------------

    def seq_remove(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Remove positions [p0, p1); see `Context.seq_remove`."""
        with self._gate:
            everywhere = checks.is_integer(seq_id) and seq_id == -1
            ids = range(self.n_seq_max) if everywhere else (self._sequence(seq_id),)
            return self._remove_from(ids, *arguments.check_range(p0, p1))

    def _remove_from(self, seq_ids: Iterable[int], p0: int, p1: int) -> bool:
        """Remove a part from several sequences, or from none."""
        held = [s for s in seq_ids if self._cells.holds(s, p0, p1)]
        if not all(self._removable(s, p0, p1) for s in held):
            return False
        removed = [self._remove(s, p0, p1) for s in held]
        return all(removed)

    def _removable(self, seq_id: int, p0: int, p1: int) -> bool:
        """Whether the declared capability covers this part."""
        kind = self.capabilities.kv_remove
        if kind == "any" or self._is_whole(seq_id, p0, p1):
            return True
        n_past = self._position(seq_id)
        if p1 < n_past or kind == "none":
            return False
        return kind == "suffix" or n_past - p0 <= self.capabilities.max_rollback

    def _is_whole(self, seq_id: int, p0: int, p1: int) -> bool:
        return self._cells.holds(seq_id, p0, p1) == self._cells.length(seq_id)

    def _remove(self, seq_id: int, p0: int, p1: int) -> bool:
        if not self._removable(seq_id, p0, p1):
            return False
        if self._is_whole(seq_id, p0, p1):
            p0, p1 = 0, arguments.MAX_POSITION
        end = self._position(seq_id)
        enter = partial(self._enter_removal, seq_id, p0, p1)
        stop = -1 if p1 == arguments.MAX_POSITION else p1
        return self._change(
            lambda: bool(self._inner.seq_remove(seq_id, p0, stop)),
            enter,
            lambda: p1 >= end and self._is_decided(enter, seq_id, p0, end),
        )

    def _enter_removal(self, seq_id: int, p0: int, p1: int) -> None:
        self._forget_outputs()
        self._cells.remove(seq_id, p0, p1)

    def _is_decided(self, enter: Callable[[], None], seq_id: int, p0: int, end: int) -> bool:
        """After an interruption: whether the engine removed all from ``p0`` on, or nothing."""
        found = self._position(seq_id)
        if found == p0 < end:
            enter()
        return found in (p0, end)

    def _change(
        self,
        work: Callable[[], T],
        enter: Callable[[], None],
        is_decided: Callable[[], bool] | None = None,
    ) -> T:
        """Run an engine call that changes the cache, and ``enter`` the change in the books.

        Where the call returns False nothing is entered. An unexpected failure of the engine ends
        the context; so does an interruption, unless ``is_decided`` finds out how far it came.
        """
        done = False
        try:
            result = work()
            done = result is not False
            if done:
                enter()
        except InferCoreError:
            raise
        except Exception as error:
            raise self._gate.fail(error) from error
        except BaseException as error:
            if done or is_decided is None or not is_decided():
                self._gate.fail(error)
            raise
        return result

    def seq_keep(self, seq_id: int) -> None:
        """Remove all other sequences."""
        with self._gate:
            kept = self._sequence(seq_id)
            for other in range(self.n_seq_max):
                if other != kept and self._cells.length(other):
                    self._remove(other, 0, arguments.MAX_POSITION)

    def clear(self) -> None:
        """Remove everything."""
        with self._gate:
            self._clear()

    def _clear(self) -> None:
        self._forget_outputs()
        own = getattr(self._inner, "clear", None)
        if own is not None:
            self._change(own, self._cells.clear, partial(self._clear_again, own))
            return
        for seq_id in range(self.n_seq_max):
            remove = partial(self._inner.seq_remove, seq_id, 0, -1)
            self._change(remove, partial(self._cells.remove, seq_id, 0, arguments.MAX_POSITION))
        self._cells.clear()

    def _clear_again(self, clear: Callable[[], None]) -> bool:
        """After an interruption: nobody knows how far the engine came, so it begins anew."""
        clear()
        self._cells.clear()
        return True

    # -- copying and moving --------------------------------------------------------------------

    def seq_copy(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Make ``dst`` hold what ``src`` holds in [p0, p1); see `Context.seq_copy`.

        What ``dst`` held in that range before is removed; of a whole copy, all it held. Output
        rows stay.
        """
        with self._gate:
            self._need("kv_copy", declared=self.capabilities.kv_copy != "none")
            source, target = self._sequence(src, "src"), self._sequence(dst, "dst")
            start, end = arguments.check_range(p0, p1)
            if source == target:
                return
            held = self._cells.holds(source, start, end)
            whole = held and held == self._cells.length(source)
            if held and not whole and self.capabilities.kv_copy != "any":
                raise UnsupportedFeatureError(
                    feature="kv_copy",
                    backend=self._backend,
                    hint="only whole sequences can be copied here; open with kv_unified=True",
                )
            self._copy(source, target, *((0, arguments.MAX_POSITION) if whole else (start, end)))

    def _copy(self, source: int, target: int, start: int, end: int) -> None:
        if self._cells.holds(target, start, end) and not self._remove(target, start, end):
            raise UnsupportedFeatureError(
                feature="kv_remove",
                backend=self._backend,
                hint=f"sequence {target} holds tokens there that cannot be removed",
            )
        if not self._cells.holds(source, start, end):
            return
        stop = -1 if end == arguments.MAX_POSITION else end
        self._change(
            lambda: self._inner.seq_copy(source, target, start, stop),
            partial(self._enter_copy, source, target, start, end),
        )

    def _enter_copy(self, source: int, target: int, start: int, end: int) -> None:
        owners = tuple(s for s in self._row_of if s != target)
        whole = self._is_whole(source, start, end)
        self._row_of = (*owners, target) if whole and source in owners else owners
        self._cells.copy(source, target, start, end)

    def seq_shift(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Add ``delta`` to the positions in [p0, p1); see `Context.seq_shift`.

        Raises `InvalidPositionError` where a position would fall below 0 or onto another one.
        """
        with self._gate:
            self._need("kv_shift", declared=self.capabilities.kv_shift)
            seq_id = self._sequence(seq_id)
            start, end = arguments.check_range(p0, p1)
            if not checks.is_integer(delta):
                raise checks.refuse("delta", delta, "an integer")
            moved = self._cells.extent(seq_id, start, end)
            if moved is None or delta == 0:
                return
            self._check_shift(seq_id, start, end, int(delta), moved)
            self._check_unshared(seq_id, start, end)
            low, high = moved[0], moved[1] + 1
            self._change(
                lambda: self._inner.seq_shift(seq_id, low, high, int(delta)),
                lambda: self._enter_move(self._cells.shift, seq_id, low, high, int(delta)),
            )

    def _check_shift(self, seq_id: int, p0: int, p1: int, delta: int, moved: Any) -> None:
        lowest, highest = moved[0] + delta, moved[1] + delta
        outside = lowest < 0 or highest >= arguments.MAX_POSITION
        clash = None if outside else self._cells.clash(seq_id, p0, p1, delta)
        if outside or clash is not None:
            what = (
                f"position {clash} would fall on {clash + delta}, which is held"
                if clash is not None
                else f"positions would become {lowest}..{highest}"
            )
            raise InvalidPositionError(
                f"delta={delta} is not allowed: {what}",
                field="delta",
                value=delta,
                allowed="a shift to free positions of at least 0",
            )

    def _check_unshared(self, seq_id: int, p0: int, p1: int) -> None:
        """Where copies are the same cells, moving one would move the other."""
        if getattr(self._inner, "shares_cells", False) and self._cells.shared(seq_id, p0, p1):
            raise UnsupportedFeatureError(
                feature="kv_shift",
                backend=self._backend,
                hint="these cells are shared with another sequence, which would move too",
            )

    def seq_divide(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide the positions in [p0, p1) by ``d``; see `Context.seq_divide`."""
        with self._gate:
            self._need("kv_divide", declared=self.capabilities.kv_divide)
            seq_id = self._sequence(seq_id)
            start, end = arguments.check_range(p0, p1)
            if not checks.is_integer(d) or not 1 <= d <= arguments.MAX_POSITION:
                raise checks.refuse("d", d, f"an integer from 1 to {arguments.MAX_POSITION}")
            if d == 1 or not self._cells.holds(seq_id, start, end):
                return
            self._check_unshared(seq_id, start, end)
            high = min(end, self._position(seq_id))
            self._change(
                lambda: self._inner.seq_divide(seq_id, start, high, int(d)),
                lambda: self._enter_move(self._cells.divide, seq_id, start, high, int(d)),
            )

    def _enter_move(self, move: Callable[[int, int, int, int], None], *args: int) -> None:
        self._forget_outputs()
        move(*args)
