"""Which replica a request goes to: by what it holds of the prefix, and within a bound on load.

Pure: it knows blocks, replicas' names and what these have reported, and nothing of Ray.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
    from collections.abc import Set as AbstractSet

BOUND = 1.25
_BLOCKS_OF_A_CALL = 1.0
"""Blocks that it pays to evaluate elsewhere rather than run beside one call more."""
_MOST_SENT = 65_536
"""Blocks of one replica that are remembered while it reports nothing."""


@attrs.frozen
class Route:
    """Where a request wants to go: to replica ``at``, or to who holds ``blocks``.

    ``begins`` marks work that may be done elsewhere where ``at`` has too much to do, ``works`` what
    counts as load until it is answered. ``origin`` is who sends it, by any name of its own, and
    ``number`` which of its calls this is.
    """

    at: str | None = None
    blocks: tuple[bytes, ...] = ()
    begins: bool = False
    works: bool = False
    origin: str = ""
    number: int = 0


@attrs.define
class _Known:
    """What is known of a replica: its last report, and what was sent to it by this router."""

    held: AbstractSet[bytes] = frozenset()
    load: int = 0
    sent: dict[bytes, Hashable] = attrs.field(factory=dict)  # and the call that came with them
    n_sent: int = 0

    @property
    def n_busy(self) -> int:
        return self.load + self.n_sent


class PrefixRouting:
    """Chooses replicas by what they report to hold, and bounds what each is given.

    A replica's load is what was sent to it from here and has not ended, and what others have it do,
    as it last reported. None is chosen whose load would be beyond ``bound`` times the mean, rounded
    up; one more than the mean is always allowed, so that few requests need not move. Blocks that
    were sent count as held until a report that was made when their call had ended: an earlier one
    cannot name them, however late it comes.
    """

    def __init__(self, *, bound: float = BOUND) -> None:
        self._bound = bound
        self._known: dict[str, _Known] = {}
        self._total = 0

    def keep(self, replicas: Collection[str]) -> None:
        """Know these replicas and no others; new ones hold nothing."""
        if len(replicas) == len(self._known) and all(name in self._known for name in replicas):
            return
        known = self._known
        self._known = {name: known.get(name) or _Known() for name in sorted(replicas)}
        self._total = sum(each.n_busy for each in self._known.values())

    def report(
        self, replica: str, held: Iterable[bytes], load: int, had_ended: Callable[[Hashable], bool]
    ) -> None:
        """Note what ``replica`` says: the blocks that it holds, and what others have it do.

        ``had_ended`` says of a call whether it was over there when the report was made.
        """
        known = self._known[replica]
        self._total += load - known.load
        known.held, known.load = frozenset(held), load
        known.sent = {block: call for block, call in known.sent.items() if not had_ended(call)}

    def heard(self, replica: str, load: int) -> None:
        """Note what others have ``replica`` do, as it said between two reports."""
        known = self._known.get(replica)
        if known is not None:
            self._total += load - known.load
            known.load = load

    def sent(self, replica: str, blocks: Iterable[bytes] = (), call: Hashable = None) -> None:
        """Note that work with these blocks was sent to ``replica``, by a call of any name."""
        known = self._known.get(replica)
        if known is not None:
            known.n_sent += 1
            self._total += 1
            self.holds(replica, blocks, call)

    def holds(self, replica: str, blocks: Iterable[bytes], call: Hashable = None) -> None:
        """Note that ``replica`` holds these blocks: ``call`` ends with them."""
        known = self._known.get(replica)
        if known is not None:
            known.sent.update(dict.fromkeys(blocks, call))
            while len(known.sent) > _MOST_SENT:
                del known.sent[next(iter(known.sent))]

    def ended(self, replica: str) -> None:
        """Note that what was sent to ``replica`` has ended."""
        known = self._known.get(replica)
        if known is not None and known.n_sent > 0:
            known.n_sent -= 1
            self._total -= 1

    def load(self, replica: str) -> int:
        """Return how much ``replica`` has to do, as far as is known."""
        return self._known[replica].n_busy

    def most(self) -> int:
        """Return the load that no replica is given more than, with one more request."""
        mean = (self._total + 1) / len(self._known)
        return max(math.ceil(self._bound * mean), math.ceil(mean) + 1)

    def n_held(self, replica: str, blocks: Sequence[bytes]) -> int:
        """Return how many of the first ``blocks`` a replica holds, without a gap."""
        known = self._known[replica]
        n = 0
        for block in blocks:
            if not (block in known.held or block in known.sent):
                break
            n += 1
        return n

    def choose(self, blocks: Sequence[bytes], *, at: str | None = None) -> list[str]:
        """Return the replicas within the bound, the best first.

        Best is who would have the least to do: the blocks that it does not hold, and
        `_BLOCKS_OF_A_CALL` for each call that it has. ``at`` is where the conversation is already,
        which is better than all. Requests for one new prefix agree on a replica, also where several
        routers choose.
        """
        known = self._known
        n = len(known)
        most = self.most() if n else 0
        turn = int.from_bytes(blocks[0], "little") if blocks else 0
        ranked = []
        for number, (name, each) in enumerate(known.items()):
            busy = each.load + each.n_sent
            if busy < most:
                held = self.n_held(name, blocks)
                cost = _BLOCKS_OF_A_CALL * busy - held
                ranked.append((name != at, cost, -held, (number - turn) % n, name))
        ranked.sort()
        return [rank[-1] for rank in ranked]
