"""Which messages of a long conversation can go, and in which order."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_KEPT_ROLES = ("system", "developer")


def droppable(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, ...]]:
    """Return groups of indices that may be left out, the first one first.

    Whole turns before the last user's; then, within that one, answers and calls with their
    results, but for the last; where no user said anything, these alone. System messages and the
    last user message are in no group, and a call never goes without its result.
    """
    users = [i for i, row in enumerate(rows) if row["role"] == "user"]
    last = users[-1] if users else 0
    starts = [i for i in range(last) if i in users or i == 0]
    groups = [
        _without_system(rows, range(start, end))
        for start, end in zip(starts, [*starts[1:], last], strict=False)
    ]
    first = last + 1 if users else 0
    answers = [i for i in range(first, len(rows)) if rows[i]["role"] == "assistant"]
    if answers and not users:
        answers[0] = 0
    rounds = [_without_system(rows, range(start, end)) for start, end in pairwise(answers)]
    return _with_results(rows, [group for group in [*groups, *rounds] if group])


def _callers(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int]]:
    """Yield each result with the message that it answers: the last one before it with its id."""
    of_id: dict[Any, int] = {}
    latest: int | None = None
    for i, row in enumerate(rows):
        for call in row.get("tool_calls") or ():
            latest = of_id[call.get("id")] = i
        if row["role"] == "tool":
            name = row.get("tool_call_id")
            caller = latest if name is None else of_id.get(name)
            if caller is not None:
                yield i, caller


def _with_results(
    rows: Sequence[Mapping[str, Any]], groups: list[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Put a call and its results into one group, or into none where one of them has to stay."""
    of_row = {i: n for n, group in enumerate(groups) for i in group}
    joined = list(range(len(groups)))  # the group that each went into
    kept: set[int] = set()

    def root(n: int) -> int:
        while joined[n] != n:
            n = joined[n]
        return n

    for i, caller in _callers(rows):
        ends = [of_row.get(caller), of_row.get(i)]
        found = sorted({root(n) for n in ends if n is not None})
        if None in ends:
            kept |= set(found)
        elif len(found) > 1:
            joined[found[1]] = found[0]
    merged: dict[int, list[int]] = {}
    for n, group in enumerate(groups):
        merged.setdefault(root(n), []).extend(group)
    stays = {root(n) for n in kept}
    return [tuple(sorted(group)) for n, group in sorted(merged.items()) if n not in stays]


def _without_system(rows: Sequence[Mapping[str, Any]], indices: range) -> tuple[int, ...]:
    return tuple(i for i in indices if rows[i]["role"] not in _KEPT_ROLES)


def n_to_drop(n_groups: int, fits: Callable[[int], bool], *, is_long: bool = False) -> int:
    """Return how many groups must go; ``fits(n)`` says whether the rest has room without ``n``.

    More go than must, in steps of half of what has room, so that a conversation that grows keeps
    the same beginning, warm, for several turns. All go where even that does not do. ``is_long``
    says that most of it will have to go: the whole, which takes longest to look at, is then tried
    last, and the answer is the same.
    """
    if not is_long and fits(0):
        return 0
    high, n_kept = n_groups, 1
    while n_kept < n_groups and fits(n_groups - n_kept):
        high, n_kept = n_groups - n_kept, 2 * n_kept
    low = max(0, n_groups - n_kept)
    if low == 0 and is_long and fits(0):
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    step = max(1, (n_groups - high) // 2)
    return min(n_groups, -(-high // step) * step)


def n_characters(rows: Sequence[Mapping[str, Any]]) -> int:
    """Return about how much text there is."""
    return sum(len(str(row.get("content") or "")) for row in rows)
