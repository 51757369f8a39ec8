"""Serve's request router for replicas of pools: `PrefixRouting` behind its public interface.

Serve copies this module by value into each front: a class of it is another one there.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any

from ray.serve.request_router import RequestRouter

from infercore_ray.routing import PrefixRouting, Route

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica


_MOST_EARLY = 4096
_STALE_S = 5.0
"""Seconds after which what was heard of others' calls counts no more: five reports are missing."""


def _had_ended(asked: Mapping[str, tuple[int, int, Sequence[int]]], call: Any) -> bool:
    """Return whether a call was over in a replica that reports to have been ``asked`` that."""
    origin, number = call
    _, last, running = asked.get(origin, (0, 0, ()))
    return number <= last and number not in running


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Sends a session's calls to the replica that has it, and new ones to who holds their prefix.

    A replica that is gone answers nothing any more: its calls go to another one, which says that
    it does not know the session, and the caller brings the session there.
    """

    queue_len_response_deadline_s = 1.0
    """Seconds in which a replica that was not heard of for long says that it is there.

    Serve's own 0.1 sends a conversation away from a replica whose machine is busy.
    """

    def initialize_state(self, *, bound: float = 1.25) -> None:
        """Begin; called by Serve with ``request_router_kwargs``."""
        self._routing = PrefixRouting(bound=bound)
        self._reports: dict[str, int] = {}
        self._origins: set[str] = set()  # whose requests come through here
        self._running: dict[str, bool] = {}  # by Serve's names of requests: whether they are work
        self._early: OrderedDict[str, None] = OrderedDict()  # ended before Serve said where it went
        self._n_calls: Counter[str] = Counter()  # calls from here, by replica
        self._n_ended: Counter[str] = Counter()  # those that ended since it said what it has to do
        self._heard_at: dict[str, float] = {}

    def _look(self, candidates: Sequence[RunningReplica]) -> dict[str, RunningReplica]:
        """Take in what the replicas reported; return them by name."""
        by_name = {each.replica_id.unique_id: each for each in candidates}
        self._routing.keep(by_name)
        if len(self._reports) > len(by_name):
            self._reports = {name: n for name, n in self._reports.items() if name in by_name}
            for counts in (self._n_calls, self._n_ended, self._heard_at):
                for name in counts.keys() - by_name.keys():
                    del counts[name]
        now = time.monotonic()
        for name, replica in by_name.items():
            told = replica.routing_stats
            if told and self._reports.get(name) != told["number"]:
                self._reports[name], self._heard_at[name] = told["number"], now
                asked = told["asked"]
                others = sum(n for who, (n, *_) in asked.items() if who not in self._origins)
                self._routing.report(name, told["held"], others, partial(_had_ended, asked))
            elif now - self._heard_at.get(name, now) > _STALE_S:
                self._routing.heard(name, 0)
        return by_name

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which they are to be tried.

        The first one is tried twice: it may be late to say that it is there.
        """
        by_name = self._look(candidate_replicas)
        route = pending_request.args[0] if pending_request and pending_request.args else None
        if not isinstance(route, Route):
            return [candidate_replicas]
        if route.at in by_name and not route.begins:
            return [[by_name[route.at]]]
        ranked = self._routing.choose(route.blocks, at=route.at)
        return [[by_name[name]] for name in ranked[:1] + ranked]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Count a call from here."""
        super().on_send_request(replica_id)
        self._n_calls[replica_id.unique_id] += 1

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        """Take in what a replica says as it takes a call: others' calls are what is not from here.

        A stream is a call a chunk, so this comes as often as chunks do. What has ended here
        meanwhile may be counted there.
        """
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        name = replica_id.unique_id
        others = num_ongoing_requests - self._n_calls[name] - self._n_ended.pop(name, 0)
        self._heard_at[name] = time.monotonic()
        self._routing.heard(name, max(0, others))

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Note what was sent where."""
        del result
        route = pending_request.args[0] if pending_request.args else None
        if not isinstance(route, Route):
            return
        self._origins.add(route.origin)
        request = pending_request.metadata.internal_request_id
        has_ended = request in self._early
        if has_ended:
            del self._early[request]
        else:
            self._running[request] = route.works
        note = self._routing.sent if route.works and not has_ended else self._routing.holds
        note(replica_id.unique_id, route.blocks, (route.origin, route.number))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Note what has ended; a short call may have done so before it is said to be routed."""
        name = replica_id.unique_id
        self._n_calls[name] = max(0, self._n_calls[name] - 1)
        self._n_ended[name] += 1
        works = self._running.pop(internal_request_id, None)
        if works:
            self._routing.ended(name)
        elif works is None:
            self._early[internal_request_id] = None
            if len(self._early) > _MOST_EARLY:  # refused ones are never said to be routed
                self._early.popitem(last=False)
