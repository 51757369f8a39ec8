"""Removing, copying, moving: what a context holds, and where."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar

from infercore.engine import calls, plugin_checks
from infercore.engine.arguments import MAX_POSITION
from infercore.errors import InferCoreError, InvalidPositionError, UnsupportedFeatureError
from infercore.values import checks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from infercore.engine.cells import CellMap
    from infercore.engine.native import Native
    from infercore.engine.results import Results

T = TypeVar("T")


class Sequences:
    """Changes of what the engine holds, each entered in the map once the engine has done it."""

    def __init__(self, native: Native, cells: CellMap, results: Results) -> None:
        self._native = native
        self._inner = native.inner
        self._kinds = native.capabilities
        self._cells = cells
        self._results = results

    def first_position(self, seq_id: int) -> int:
        """Return the first position held, -1 when empty."""
        own = self._native.optional.seq_pos_min
        if own is not None:
            return int(self._native.judged(own, seq_id))
        found = self._cells.extent(seq_id, 0, MAX_POSITION)
        return found[0] if found else -1

    # -- removing ------------------------------------------------------------------------------

    def remove_from(self, seq_ids: Iterable[int], p0: int, p1: int) -> bool:
        """Remove a part from several sequences, or from none."""
        held = [s for s in seq_ids if self._cells.holds(s, p0, p1)]
        if not all(self._removable(s, p0, p1) for s in held):
            return False
        removed = [self.remove(s, p0, p1) for s in held]
        return all(removed)

    def _removable(self, seq_id: int, p0: int, p1: int) -> bool:
        """Whether the declared capability covers this part."""
        kind = self._kinds.kv_remove
        if kind == "any" or self._is_whole(seq_id, p0, p1):
            return True
        n_past = self._native.position(seq_id)
        if p1 < n_past or kind == "none":
            return False
        return kind == "suffix" or n_past - p0 <= self._kinds.max_rollback

    def _is_whole(self, seq_id: int, p0: int, p1: int) -> bool:
        return self._cells.holds(seq_id, p0, p1) == self._cells.length(seq_id)

    def remove(self, seq_id: int, p0: int, p1: int) -> bool:
        """Remove [p0, p1) of one sequence; False, and nothing changed, where that cannot be."""
        if not self._removable(seq_id, p0, p1):
            return False
        if self._is_whole(seq_id, p0, p1):
            p0, p1 = 0, MAX_POSITION
        end = self._native.position(seq_id)
        enter = partial(self._enter, seq_id, partial(self._cells.remove, seq_id, p0, p1))
        stop = -1 if p1 == MAX_POSITION else p1
        is_removed = self._change(
            lambda: self._removed(seq_id, p0, stop),
            enter,
            lambda: p1 >= end and self._is_decided(enter, seq_id, end),
        )
        if is_removed and p1 >= end:
            self._check_end(seq_id, f"seq_remove({seq_id}, {p0}, {stop})")
        return is_removed

    def _check_end(self, seq_id: int, call: str) -> None:
        """Stop trusting an engine whose sequence ends elsewhere than ``call`` leaves it."""
        found, expected = self._native.position(seq_id), self._cells.next_position(seq_id)
        if found != expected:
            told = f"left the next position at {found}, not at {expected}"
            raise self._native.lock.fail(plugin_checks.wrong(self._native.backend, call, told))

    def _removed(self, seq_id: int, p0: int, p1: int) -> bool:
        """Return whether the engine removed it; what answers neither may have done either."""
        found: object = self._inner.seq_remove(seq_id, p0, p1)
        if found is None:
            call, told = f"seq_remove({seq_id}, {p0}, {p1})", "returned None, not True or False"
            raise self._native.lock.fail(plugin_checks.wrong(self._native.backend, call, told))
        return bool(found)

    def _enter(self, seq_id: int, change: Callable[[], None]) -> None:
        self._results.drop(seq_id)
        change()

    def _is_decided(self, enter: Callable[[], None], seq_id: int, end: int) -> bool:
        """After an interruption: whether the engine did it whole, or nothing of it."""
        found = self._native.position(seq_id)
        if found < end:
            enter()
            self._cells.recount()  # it may have come between a run and its length
        return found == self._cells.next_position(seq_id)

    def _change(
        self,
        work: Callable[[], T],
        enter: Callable[[], None],
        is_decided: Callable[[], bool] | None = None,
    ) -> T:
        """Run an engine call that changes the cache, and ``enter`` the change in the map.

        Where the call returns False nothing is entered. An unexpected failure of the engine ends
        the context. After an interruption that ``is_decided`` does not find out about, a context of
        one sequence holds nothing, and one of several ends.
        """
        try:
            result = work()
            if result is not False:
                enter()
        except InferCoreError:
            raise
        except BaseException as error:
            if calls.is_of_the_engine(error):
                raise self._native.lock.fail(error) from error
            if is_decided is None or not is_decided():
                self._begin_anew(error)
            raise
        return result

    def _begin_anew(self, cause: BaseException) -> None:
        """Hold nothing: nobody knows what the engine does; of others' sequences even less."""
        if self._cells.n_seq_max > 1:
            self._native.lock.fail(cause)
            return
        try:
            self.clear()
        except BaseException:
            self._native.lock.fail(cause)
            raise

    def keep(self, seq_id: int) -> None:
        """Remove all other sequences."""
        for other in range(self._cells.n_seq_max):
            if other != seq_id and self._cells.length(other):
                self.remove(other, 0, MAX_POSITION)

    def clear(self) -> None:
        """Remove everything."""
        self._results.forget()
        own = self._native.optional.clear
        if own is not None:
            self._change(own, self._cells.clear, partial(self._clear_again, own))
            return
        for seq_id in range(self._cells.n_seq_max):
            n_held, remove = self._cells.length(seq_id), partial(self._removed, seq_id, 0, -1)
            enter = partial(self._cells.remove, seq_id, 0, MAX_POSITION)
            if not self._change(remove, enter) and n_held:
                call, told = f"seq_remove({seq_id}, 0, -1)", "refused to remove a whole sequence"
                raise self._native.lock.fail(plugin_checks.wrong(self._native.backend, call, told))

    def _clear_again(self, clear: Callable[[], None]) -> bool:
        """After an interruption: nobody knows how far the engine came, so it begins anew."""
        clear()
        self._cells.clear()
        return True

    def empty(self, seq_id: int) -> None:
        """Remove all of a sequence of which nobody knows what the engine holds."""
        try:
            self._inner.seq_remove(seq_id, 0, -1)
            if self._inner.n_past(seq_id):
                raise RuntimeError(f"sequence {seq_id} could not be emptied")
        except Exception as error:
            raise self._native.lock.fail(error) from error
        self._enter(seq_id, partial(self._cells.remove, seq_id, 0, MAX_POSITION))

    # -- copying and moving --------------------------------------------------------------------

    def copy(self, source: int, target: int, p0: int, p1: int) -> None:
        """Make ``target`` hold what ``source`` holds in [p0, p1), and nothing else there."""
        held = self._cells.holds(source, p0, p1)
        whole = bool(held) and held == self._cells.length(source)
        if held and not whole and self._kinds.kv_copy != "any":
            raise UnsupportedFeatureError(
                feature="kv_copy",
                backend=self._native.backend,
                hint="only whole sequences can be copied here; open with kv_unified=True",
            )
        if whole:
            p0, p1 = 0, MAX_POSITION
        if self._cells.holds(target, p0, p1) and not self.remove(target, p0, p1):
            raise UnsupportedFeatureError(
                feature="kv_remove",
                backend=self._native.backend,
                hint=f"sequence {target} holds tokens there that cannot be removed",
            )
        if held:
            stop = -1 if p1 == MAX_POSITION else p1
            self._change(
                lambda: self._inner.seq_copy(source, target, p0, stop),
                lambda: self._enter_copy(source, target, p0, p1),
            )

    def _enter_copy(self, source: int, target: int, p0: int, p1: int) -> None:
        self._results.drop(target)
        if self._is_whole(source, p0, p1):
            self._results.outputs.share(source, target)
        self._cells.copy(source, target, p0, p1)

    def shift(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Add ``delta`` to the positions in [p0, p1)."""
        moved = self._cells.extent(seq_id, p0, p1)
        if moved is None or delta == 0:
            return
        self._check_shift(seq_id, p0, p1, delta, moved)
        self._check_unshared(seq_id, p0, p1)
        low, high = moved[0], moved[1] + 1
        self._change(
            lambda: self._inner.seq_shift(seq_id, low, high, delta),
            lambda: self._enter(seq_id, partial(self._cells.shift, seq_id, low, high, delta)),
        )

    def _check_shift(
        self, seq_id: int, p0: int, p1: int, delta: int, moved: tuple[int, int]
    ) -> None:
        lowest, highest = moved[0] + delta, moved[1] + delta
        outside = lowest < 0 or highest >= MAX_POSITION
        clash = None if outside else self._cells.clash(seq_id, p0, p1, delta)
        if outside or clash is not None:
            what = (
                f"position {clash} would fall on {clash + delta}, which is held"
                if clash is not None
                else f"positions would become {checks.shown(lowest)}..{checks.shown(highest)}"
            )
            raise InvalidPositionError(
                f"delta={checks.shown(delta)} is not allowed: {what}",
                field="delta",
                value=delta,
                allowed="a shift to free positions of at least 0",
            )

    def _check_unshared(self, seq_id: int, p0: int, p1: int) -> None:
        """Where copies are the same cells, moving one would move the other."""
        if self._native.optional.shares_cells and self._cells.shared(seq_id, p0, p1):
            raise UnsupportedFeatureError(
                feature="kv_shift",
                backend=self._native.backend,
                hint="these cells are shared with another sequence, which would move too",
            )

    def divide(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide the positions in [p0, p1) by ``d``."""
        if d == 1 or not self._cells.holds(seq_id, p0, p1):
            return
        self._check_unshared(seq_id, p0, p1)
        high = min(p1, self._native.position(seq_id))
        self._change(
            lambda: self._inner.seq_divide(seq_id, p0, high, d),
            lambda: self._enter(seq_id, partial(self._cells.divide, seq_id, p0, high, d)),
        )
