"""What routing is worth on 64 replicas, simulated: the routers' own code, and costs measured here.

    python integrations/ray/benchmarks/simulate.py [--requests N] [--router NAME]

Conversations have the means of LMSYS-Chat-1M (Zheng et al., arXiv:2309.11998: about 2 turns, 70
tokens a prompt and 215 a response, as the paper has them; not checked again). Their spread is an
assumption (turns geometric, lengths log-normal with sigma 1), as are 30 s of thought between turns
and one of 100 system prompts of 256 tokens, by Zipf's law, in front of each conversation. A replica
runs 8 sessions and keeps the blocks of 32,768 tokens, the least recently used going first. Costs
are those measured on two cores for the 0.5B model: steps in q4_0, prompts in q8_0. Replicas report
every second, as `infercore_ray` lets them. Beside that each front knows what it sent itself, and
what replicas say with their answers. Serve's routers are those of the Ray that is installed.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
import time
from collections import OrderedDict, deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import attrs
from ray.llm._internal.serve.routing_policies.prefix_aware import prefix_aware_router
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter

from infercore_ray.blocks import BLOCK_TOKENS
from infercore_ray.routing import PrefixRouting

if TYPE_CHECKING:
    from collections.abc import Hashable

PrefixCacheAffinityRouter = prefix_aware_router.PrefixCacheAffinityRouter
CLOCK = SimpleNamespace(now=0.0)
prefix_aware_router.ray = SimpleNamespace(get=lambda answer: answer)  # there is no Ray
prefix_aware_router.time = SimpleNamespace(time=lambda: CLOCK.now)

TURNS, PROMPT, RESPONSE = 2.02, 69.53, 214.54
SYSTEM_TOKENS, N_SYSTEMS = 256, 100
THOUGHT_S, REPORT_S = 30.0, 1.0
N_PARALLEL, N_CELLS = 8, 32768
PREFILL_S = 1 / 176
STEP_S = (0.0, 0.0078, 0.0134, 0.0194, 0.0144, 0.0197, 0.0250, 0.0250, 0.0250)
"""Seconds of a step with so many sessions, a token each; those with 5 and 7 were not measured."""
_FIRST, _N_CHARACTERS = 0x10000, 0x100000


@attrs.define
class Turn:
    """One request: what it begins with, what it adds, and what comes after it."""

    conversation: list[bytes]
    n_prompt: int
    n_response: int
    n_turns_left: int
    arrived: float = 0.0
    started: float = 0.0
    replica: int = -1
    front: int = 0
    call: int = -1
    is_follow: bool = False


class Replica:
    """Sessions that run, others that wait, and the blocks that are held."""

    def __init__(self, n_fronts: int) -> None:
        self.n_running = self.n_busy = 0
        self.n_running_of = [0] * n_fronts
        self.waiting: deque[Turn] = deque()
        self.held: OrderedDict[bytes, None] = OrderedDict()
        self.reported: frozenset[bytes] | None = None

    def n_cached(self, blocks: list[bytes]) -> int:
        """Return how many of the first blocks are held."""
        return next((n for n, block in enumerate(blocks) if block not in self.held), len(blocks))

    def keep(self, blocks: list[bytes]) -> None:
        """Hold these blocks, and let go of the oldest: of ends before beginnings."""
        self.reported = None
        for block in reversed(blocks):
            self.held[block] = None
            self.held.move_to_end(block)
        while len(self.held) > N_CELLS // BLOCK_TOKENS:
            self.held.popitem(last=False)


class Router(Protocol):
    """What chooses a replica, in each of several fronts."""

    def choose(self, now: float, turn: Turn, blocks: list[bytes]) -> int:
        """Return the number of a replica, for a turn that comes to ``turn.front``."""
        ...

    def sent(self, now: float, turn: Turn, blocks: list[bytes]) -> None:
        """Note what was sent where; the replica has just said what it has to do."""
        ...

    def ended(self, turn: Turn, blocks: list[bytes]) -> None:
        """Note what has ended."""
        ...

    def report(self, number: int) -> None:
        """Tell each front what a replica reports."""
        ...


class Ours:
    """`PrefixRouting` as `PrefixRouter` drives it.

    A front hears a replica's load with the answer to each call, and a stream is a call a chunk: it
    knows the load where a turn of its own runs, and where it just sent one.
    """

    def __init__(self, replicas: list[Replica], n_fronts: int, **fields: Any) -> None:
        self._replicas = replicas
        self._names = [f"replica-{number:03d}" for number in range(len(replicas))]
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._fronts = [PrefixRouting(**fields) for _ in range(n_fronts)]
        self._own = [[0] * len(replicas) for _ in range(n_fronts)]
        for front in self._fronts:
            front.keep(self._names)
        self._calls = itertools.count()
        self._running: set[int] = set()

    def choose(self, now: float, turn: Turn, blocks: list[bytes]) -> int:
        """Return who is ranked first."""
        del now
        front, own = self._fronts[turn.front], self._own[turn.front]
        for number, replica in enumerate(self._replicas):
            if replica.n_running_of[turn.front]:
                front.heard(self._names[number], replica.n_busy - own[number])
        return self._numbers[front.choose(blocks)[0]]

    def sent(self, now: float, turn: Turn, blocks: list[bytes]) -> None:
        """Let the front know."""
        del now
        number, front = turn.replica, self._fronts[turn.front]
        self._own[turn.front][number] += 1
        turn.call = next(self._calls)
        self._running.add(turn.call)
        front.sent(self._names[number], blocks, turn.call)
        others = self._replicas[number].n_busy - self._own[turn.front][number]
        front.heard(self._names[number], others)

    def ended(self, turn: Turn, blocks: list[bytes]) -> None:
        """Let the front know whose turn has ended, and what the replica holds then."""
        front, name = self._fronts[turn.front], self._names[turn.replica]
        front.ended(name)
        front.holds(name, blocks, turn.call)
        self._running.remove(turn.call)
        self._own[turn.front][turn.replica] -= 1

    def report(self, number: int) -> None:
        """Tell each front what a replica holds, and what the others have it do."""
        replica = self._replicas[number]
        if replica.reported is None:
            replica.reported = frozenset(replica.held)
        held = replica.reported
        for front, own in zip(self._fronts, self._own, strict=True):
            others = replica.n_busy - own[number]
            front.report(self._names[number], held, others, self._had_ended)

    def _had_ended(self, call: Hashable) -> bool:
        return call not in self._running


class Random:
    """Any."""

    def __init__(self, replicas: list[Replica], draw: random.Random) -> None:
        self._n = len(replicas)
        self._draw = draw

    def choose(self, now: float, turn: Turn, blocks: list[bytes]) -> int:
        """Return any."""
        del now, turn, blocks
        return self._draw.randrange(self._n)

    def sent(self, now: float, turn: Turn, blocks: list[bytes]) -> None:
        """Forget it."""

    def ended(self, turn: Turn, blocks: list[bytes]) -> None:
        """Forget it."""

    def report(self, number: int) -> None:
        """Forget it."""


class Serve:
    """A router of Ray Serve: its own code, with what Serve lets each front know.

    A front knows the queue of a replica as that told it when it last took a request from this
    front, less what has ended since; where it never sent one, it asks. The tree of the
    prefix-aware router is one for all fronts and grows without bound, as it does by default. It
    counts characters: here a block of tokens is two of them.
    """

    def __init__(self, base: Any, replicas: list[Replica], n_fronts: int, **fields: Any) -> None:
        where = DeploymentID(name="model", app_name="simulation")
        self._replicas = replicas
        self._ids = [ReplicaID(f"replica-{n:03d}", where) for n in range(len(replicas))]
        self._numbers = {each: number for number, each in enumerate(self._ids)}
        candidates = [
            SimpleNamespace(replica_id=each, max_ongoing_requests=10**6) for each in self._ids
        ]
        tree = PrefixTree()
        tree.add_tenants([each.to_full_id_str() for each in self._ids], 0.0)
        self._known: list[dict[Any, int]] = [{} for _ in range(n_fronts)]
        self._routers = []
        kind = type("Simulated", (_Without, base), {"__abstractmethods__": frozenset()})
        for known in self._known:
            router = kind.__new__(kind)
            router._replicas = dict(zip(self._ids, candidates, strict=True))  # noqa: SLF001
            router._use_replica_queue_len_cache = True  # noqa: SLF001
            router._replica_queue_len_cache = known  # noqa: SLF001
            if base is PrefixCacheAffinityRouter:
                router.initialize_state(tree_actor=_Actor(tree), **fields)
            router.n_busy = lambda each: self._replicas[self._numbers[each]].n_busy
            self._routers.append(router)
        self._candidates = candidates
        self._takes_blocks = base is PrefixCacheAffinityRouter

    @staticmethod
    def _pending(blocks: list[bytes]) -> Any:
        text = "".join(
            chr(_FIRST + number % _N_CHARACTERS) + chr(_FIRST + number // _N_CHARACTERS)
            for number in (int.from_bytes(block, "big") for block in blocks)
        )
        metadata = SimpleNamespace(multiplexed_model_id="")
        return SimpleNamespace(args=[SimpleNamespace(prompt=text)], metadata=metadata)

    def choose(self, now: float, turn: Turn, blocks: list[bytes]) -> int:
        """Return what the router chooses, and of that the one with the shortest queue it knows."""
        del now
        router = self._routers[turn.front]
        pending = self._pending(blocks)
        (ranked, *_) = _now(router.choose_replicas(self._candidates, pending))
        chosen = _now(router._select_from_candidate_replicas(ranked, 0))  # noqa: SLF001
        return self._numbers[chosen.replica_id]

    def sent(self, now: float, turn: Turn, blocks: list[bytes]) -> None:
        """Let the front know: it was told the queue."""
        chosen = self._ids[turn.replica]
        self._known[turn.front][chosen] = self._replicas[turn.replica].n_busy
        if self._takes_blocks:
            CLOCK.now = now
            self._routers[turn.front].on_request_routed(self._pending(blocks), chosen, None)

    def ended(self, turn: Turn, blocks: list[bytes]) -> None:
        """Let the front know."""
        del blocks
        known, chosen = self._known[turn.front], self._ids[turn.replica]
        known[chosen] = max(0, known[chosen] - 1)

    def report(self, number: int) -> None:
        """Report nothing."""


class _Without:
    """What a router of Serve asks of a Ray that runs."""

    n_busy: Any
    _replicas: dict[Any, Any]
    _replica_queue_len_cache: dict[Any, int]

    def apply_locality_routing(self, pending_request: Any) -> list[Any]:
        """Return all: none is nearer."""
        del pending_request
        return list(self._replicas)

    async def _probe_queue_lens(self, replicas: list[Any], _: int) -> list[tuple[Any, int]]:
        found = [(each, self.n_busy(each.replica_id)) for each in replicas]
        self._replica_queue_len_cache.update({one.replica_id: n for one, n in found})
        return found

    @property
    def _event_loop(self) -> Any:
        return SimpleNamespace(create_task=_now)


class _Actor:
    """An actor's face: what is asked of it is answered at once."""

    def __init__(self, behind: Any) -> None:
        self._behind = behind

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._behind, name))


def _now(work: Any) -> Any:
    """Return what a coroutine returns that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as ended:
        return ended.value
    raise RuntimeError("it waits")


class Simulation:
    """Requests that arrive, wait, run and end."""

    def __init__(self, make: Any, n_replicas: int, n_fronts: int, rate: float, seed: int) -> None:
        self._replicas = [Replica(n_fronts) for _ in range(n_replicas)]
        self._router: Router = make(self._replicas)
        self._draw = random.Random(seed)
        self._n_fronts = n_fronts
        self._rate = rate
        self._order = itertools.count()
        self._block = itertools.count()
        self._events: list[tuple[float, int, str, Any]] = []
        systems = SYSTEM_TOKENS // BLOCK_TOKENS
        self._systems = [[self._new_block() for _ in range(systems)] for _ in range(N_SYSTEMS)]
        self._zipf = list(itertools.accumulate(1 / n for n in range(1, N_SYSTEMS + 1)))
        self.firsts: list[float] = []
        self.n_prompt = self.n_cached = 0
        self.n_follow = self.n_at_holder = 0
        self.n_prompt_follow = self.n_cached_follow = 0
        self.worst = 0.0
        self.n_looks = 0

    def _new_block(self) -> bytes:
        return next(self._block).to_bytes(8, "big")

    def _length(self, mean: float) -> int:
        return max(1, round(self._draw.lognormvariate(math.log(mean) - 0.5, 1.0)))

    def _at(self, when: float, what: str, value: Any) -> None:
        heapq.heappush(self._events, (when, next(self._order), what, value))

    def _turn(self, conversation: list[bytes], n_left: int) -> Turn:
        return Turn(conversation, self._length(PROMPT), self._length(RESPONSE), n_left)

    def run(self, n_requests: int) -> None:
        """Let so many requests come, and all of them end."""
        self._at(0.0, "conversation", None)
        for number in range(len(self._replicas)):
            self._at(REPORT_S * number / len(self._replicas), "report", number)
        n_left = n_requests
        while self._events:
            now, _, what, value = heapq.heappop(self._events)
            if what == "conversation" and n_left > 0:
                self._at(now + self._draw.expovariate(self._rate / TURNS), what, None)
                (system,) = self._draw.choices(self._systems, cum_weights=self._zipf)
                n_turns = 1 + int(math.log(1 - self._draw.random()) / math.log(1 - 1 / TURNS))
                what, value = "turn", self._turn(list(system), n_turns - 1)
            if what == "turn" and n_left > 0:
                n_left -= 1
                self._arrive(now, value)
            elif what == "end":
                self._end(now, value)
            elif what == "report" and (n_left > 0 or any(r.n_busy for r in self._replicas)):
                self._router.report(value)
                self._at(now + REPORT_S, what, value)

    def _arrive(self, now: float, turn: Turn) -> None:
        turn.arrived = now
        before = turn.replica
        n_new = turn.n_prompt // BLOCK_TOKENS
        turn.conversation += [self._new_block() for _ in range(n_new)]
        turn.front = self._draw.randrange(self._n_fronts)
        turn.replica = self._router.choose(now, turn, turn.conversation)
        if before >= 0:
            self.n_follow += 1
            self.n_at_holder += before == turn.replica
        replica = self._replicas[turn.replica]
        replica.n_busy += 1
        self._router.sent(now, turn, turn.conversation)
        replica.waiting.append(turn)
        self._begin(now, replica)
        loads = [each.n_busy for each in self._replicas]
        self.n_looks += 1
        self.worst += max(loads) * len(loads) / sum(loads)

    def _begin(self, now: float, replica: Replica) -> None:
        while replica.waiting and replica.n_running < N_PARALLEL:
            turn = replica.waiting.popleft()
            replica.n_running += 1
            replica.n_running_of[turn.front] += 1
            n_tokens = len(turn.conversation) * BLOCK_TOKENS + turn.n_prompt % BLOCK_TOKENS
            n_cached = replica.n_cached(turn.conversation) * BLOCK_TOKENS
            self.n_prompt += n_tokens
            self.n_cached += n_cached
            if turn.is_follow:
                self.n_prompt_follow += n_tokens
                self.n_cached_follow += n_cached
            prefill = (n_tokens - n_cached) * PREFILL_S * (1 + 0.25 * (replica.n_running - 1))
            self.firsts.append(now + prefill - turn.arrived)
            step = STEP_S[replica.n_running]
            self._at(now + prefill + turn.n_response * step, "end", turn)

    def _end(self, now: float, turn: Turn) -> None:
        replica = self._replicas[turn.replica]
        replica.n_running -= 1
        replica.n_busy -= 1
        replica.n_running_of[turn.front] -= 1
        n_blocks = turn.n_response // BLOCK_TOKENS
        turn.conversation += [self._new_block() for _ in range(n_blocks)]
        replica.keep(turn.conversation)
        self._router.ended(turn, turn.conversation)
        if turn.n_turns_left:
            after = self._turn(turn.conversation, turn.n_turns_left - 1)
            after.replica = turn.replica
            after.is_follow = True
            self._at(now + self._draw.expovariate(1 / THOUGHT_S), "turn", after)
        self._begin(now, replica)


def main() -> None:
    """Simulate with each router, and print a table."""
    parser = argparse.ArgumentParser(description="simulate replicas behind several routers")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--fronts", type=int, default=4, help="where requests come to, at random")
    parser.add_argument("--load", type=float, default=0.7, help="of what 8 sessions a replica take")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--router", action="append", help="one of them; repeatable")
    given = parser.parse_args()
    seconds = RESPONSE * STEP_S[N_PARALLEL] + 2 * PROMPT * PREFILL_S
    rate = given.load * given.replicas * N_PARALLEL / seconds
    aware = PrefixCacheAffinityRouter
    makers: dict[str, tuple[str, Any]] = {
        "ours": ("`infercore_ray`", lambda those: Ours(those, given.fronts)),
        "aware": (
            "Serve's prefix-aware one, threshold 10",
            lambda those: Serve(aware, those, given.fronts, imbalanced_threshold=10),
        ),
        "default": (
            "the same, its default threshold (none)",
            lambda those: Serve(aware, those, given.fronts),
        ),
        "two": (
            "Serve's default, power of two",
            lambda those: Serve(PowerOfTwoChoicesRequestRouter, those, given.fronts),
        ),
        "random": ("random", lambda those: Random(those, random.Random(given.seed + 1))),
    }
    print(f"{given.requests} requests, {rate:.1f} a second, {given.replicas} replicas")
    print("| router | tokens found | of follow-ups | follow-ups at the last replica | "
          "max load over mean | first token p50, s | p99, s | processor seconds |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for name in given.router or makers:
        title, make = makers[name]
        random.seed(given.seed)  # of Serve's routers
        began = time.process_time()
        one = Simulation(make, given.replicas, given.fronts, rate, given.seed)
        one.run(given.requests)
        firsts = sorted(one.firsts)
        print(
            f"| {title} | {one.n_cached / one.n_prompt:.3f} | "
            f"{one.n_cached_follow / max(1, one.n_prompt_follow):.3f} | "
            f"{one.n_at_holder / max(1, one.n_follow):.3f} | {one.worst / one.n_looks:.2f} | "
            f"{firsts[len(firsts) // 2]:.2f} | {firsts[len(firsts) * 99 // 100]:.2f} | "
            f"{time.process_time() - began:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
