"""What routing is worth on 64 replicas, simulated: the router's own code, and costs measured here.

    python integrations/ray/benchmarks/simulate.py [--requests N] [--load L] [--fronts N]

Conversations have the means of LMSYS-Chat-1M (Zheng et al., arXiv:2309.11998: about 2 turns, 70
tokens a prompt and 215 a response, as the paper has them; not checked again). Their spread is an
assumption (turns geometric, lengths log-normal with sigma 1), as are 30 s of thought between turns
and one of 100 system prompts of 256 tokens, by Zipf's law, in front of each conversation. A replica
runs 8 sessions and keeps the blocks of 32,768 tokens, the least recently used going first. Costs
are those measured on two cores for the 0.5B model: steps in q4_0, prompts in q8_0. Replicas report
every second, as `infercore_ray` lets them; beside that each front knows what it sent itself.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
import time
from collections import OrderedDict, deque
from typing import Any, Protocol

import attrs

from infercore_ray.blocks import BLOCK_TOKENS
from infercore_ray.routing import PrefixRouting

TURNS, PROMPT, RESPONSE = 2.02, 69.53, 214.54
SYSTEM_TOKENS, N_SYSTEMS = 256, 100
THOUGHT_S, REPORT_S = 30.0, 1.0
N_PARALLEL, N_CELLS = 8, 32768
PREFILL_S = 1 / 176
STEP_S = (0.0, 0.0078, 0.0134, 0.0194, 0.0144, 0.0197, 0.0250, 0.0250, 0.0250)
"""Seconds of a step with so many sessions, a token each; those with 5 and 7 were not measured."""


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


class Replica:
    """Sessions that run, others that wait, and the blocks that are held."""

    def __init__(self) -> None:
        self.n_running = 0
        self.waiting: deque[Turn] = deque()
        self.held: OrderedDict[bytes, None] = OrderedDict()

    @property
    def n_busy(self) -> int:
        """Return how much there is to do."""
        return self.n_running + len(self.waiting)

    def n_cached(self, blocks: list[bytes]) -> int:
        """Return how many of the first blocks are held."""
        return next((n for n, block in enumerate(blocks) if block not in self.held), len(blocks))

    def keep(self, blocks: list[bytes]) -> None:
        """Hold these blocks, and let go of the oldest: of ends before beginnings."""
        for block in reversed(blocks):
            self.held[block] = None
            self.held.move_to_end(block)
        while len(self.held) > N_CELLS // BLOCK_TOKENS:
            self.held.popitem(last=False)


class Router(Protocol):
    """What chooses a replica."""

    def choose(self, turn: Turn, replicas: list[Replica]) -> int:
        """Return the number of a replica."""
        ...


class Ours:
    """`PrefixRouting` as the request router on Ray drives it, in each of several fronts."""

    def __init__(self, n: int, n_fronts: int, draw: random.Random) -> None:
        self._names = [f"replica-{number:03d}" for number in range(n)]
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._fronts = [PrefixRouting() for _ in range(n_fronts)]
        self._n_running = [[0] * n for _ in range(n_fronts)]
        self._draw = draw
        for front in self._fronts:
            front.keep(self._names)

    def choose(self, turn: Turn, _: list[Replica]) -> int:
        """Return who is ranked first, by any front."""
        turn.front = self._draw.randrange(len(self._fronts))
        front = self._fronts[turn.front]
        name = front.choose(turn.conversation)[0]
        front.sent(name, turn.conversation)
        self._n_running[turn.front][self._numbers[name]] += 1
        return self._numbers[name]

    def ended(self, turn: Turn) -> None:
        """Let the front know whose turn has ended, and what the replica holds then."""
        front, name = self._fronts[turn.front], self._names[turn.replica]
        front.ended(name)
        front.holds(name, turn.conversation)
        self._n_running[turn.front][turn.replica] -= 1

    def report(self, number: int, replica: Replica) -> None:
        """Tell each front what a replica holds, and what the others have it do."""
        held = frozenset(replica.held)
        for front, running in zip(self._fronts, self._n_running, strict=True):
            front.report(self._names[number], held, replica.n_busy - running[number])


class Random:
    """Any."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw

    def choose(self, _: Turn, replicas: list[Replica]) -> int:
        """Return any."""
        return self._draw.randrange(len(replicas))


class PowerOfTwo:
    """The one of two with less to do, which it knows exactly."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw

    def choose(self, _: Turn, replicas: list[Replica]) -> int:
        """Return the better of two."""
        return min(self._draw.sample(range(len(replicas)), 2), key=lambda n: replicas[n].n_busy)


class PrefixAware:
    """After the description of Ray's own: who was sent the most of it, unless loads differ by 10.

    It remembers all that was ever sent, as that does by default.
    """

    def __init__(self, draw: random.Random) -> None:
        self._two = PowerOfTwo(draw)
        self._sent: dict[bytes, set[int]] = {}

    def choose(self, turn: Turn, replicas: list[Replica]) -> int:
        """Return who was sent the beginning, if at least a tenth of it."""
        busy = [replica.n_busy for replica in replicas]
        found: set[int] = set()
        n = 0
        if max(busy) - min(busy) <= 10:  # noqa: PLR2004  (Ray's imbalanced_threshold)
            for block in turn.conversation:
                both = self._sent.get(block, set())
                both = both & found if n else both
                if not both:
                    break
                found, n = both, n + 1
        enough = n >= 0.1 * len(turn.conversation)
        number = min(found, key=lambda one: busy[one]) if found and enough else None
        chosen = self._two.choose(turn, replicas) if number is None else number
        for block in turn.conversation:
            self._sent.setdefault(block, set()).add(chosen)
        return chosen


class Simulation:
    """Requests that arrive, wait, run and end."""

    def __init__(self, router: Router, n_replicas: int, rate: float, seed: int) -> None:
        self._router = router
        self._replicas = [Replica() for _ in range(n_replicas)]
        self._draw = random.Random(seed)
        self._rate = rate
        self._order = itertools.count()
        self._block = itertools.count()
        self._events: list[tuple[float, int, str, Any]] = []
        systems = SYSTEM_TOKENS // BLOCK_TOKENS
        self._systems = [[self._new_block() for _ in range(systems)] for _ in range(N_SYSTEMS)]
        self._zipf = list(itertools.accumulate(1 / n for n in range(1, N_SYSTEMS + 1)))
        self.firsts: list[float] = []
        self.n_prompt = self.n_cached = self.n_could = 0
        self.n_follow = self.n_at_holder = 0
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
        if isinstance(self._router, Ours):
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
                self._router.report(value, self._replicas[value])  # type: ignore[attr-defined]
                self._at(now + REPORT_S, what, value)

    def _arrive(self, now: float, turn: Turn) -> None:
        turn.arrived = now
        before = turn.replica
        n_new = turn.n_prompt // BLOCK_TOKENS
        turn.conversation += [self._new_block() for _ in range(n_new)]
        turn.replica = self._router.choose(turn, self._replicas)
        if before >= 0:
            self.n_follow += 1
            self.n_at_holder += before == turn.replica
        replica = self._replicas[turn.replica]
        replica.waiting.append(turn)
        self._begin(now, replica)
        loads = [each.n_busy for each in self._replicas]
        mean = sum(loads) / len(loads)
        self.n_looks += 1
        self.worst += max(loads) / mean

    def _begin(self, now: float, replica: Replica) -> None:
        while replica.waiting and replica.n_running < N_PARALLEL:
            turn = replica.waiting.popleft()
            replica.n_running += 1
            n_tokens = len(turn.conversation) * BLOCK_TOKENS + turn.n_prompt % BLOCK_TOKENS
            n_cached = replica.n_cached(turn.conversation) * BLOCK_TOKENS
            self.n_prompt += n_tokens
            self.n_cached += n_cached
            prefill = (n_tokens - n_cached) * PREFILL_S * (1 + 0.25 * (replica.n_running - 1))
            self.firsts.append(now + prefill - turn.arrived)
            step = STEP_S[replica.n_running]
            self._at(now + prefill + turn.n_response * step, "end", turn)

    def _end(self, now: float, turn: Turn) -> None:
        replica = self._replicas[turn.replica]
        replica.n_running -= 1
        n_blocks = turn.n_response // BLOCK_TOKENS
        turn.conversation += [self._new_block() for _ in range(n_blocks)]
        replica.keep(turn.conversation)
        if isinstance(self._router, Ours):
            self._router.ended(turn)
        if turn.n_turns_left:
            after = self._turn(turn.conversation, turn.n_turns_left - 1)
            after.replica = turn.replica
            self._at(now + self._draw.expovariate(1 / THOUGHT_S), "turn", after)
        self._begin(now, replica)


def main() -> None:
    """Simulate with each router, and print a table."""
    parser = argparse.ArgumentParser(description="simulate replicas behind several routers")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument(
        "--fronts", type=int, default=4, help="routers of ours, which share nothing"
    )
    parser.add_argument("--load", type=float, default=0.7, help="of what 8 sessions a replica take")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--router", action="append", help="ours, random, two or aware; repeatable")
    given = parser.parse_args()
    seconds = RESPONSE * STEP_S[N_PARALLEL] + 2 * PROMPT * PREFILL_S
    rate = given.load * given.replicas * N_PARALLEL / seconds
    draw = random.Random(given.seed + 1)
    makers: dict[str, tuple[str, Any]] = {
        "ours": ("`PrefixRouting`", lambda: Ours(given.replicas, given.fronts, draw)),
        "random": ("random", lambda: Random(draw)),
        "two": ("power of two, exact queues", lambda: PowerOfTwo(draw)),
        "aware": ("after Ray's prefix-aware one", lambda: PrefixAware(draw)),
    }
    print(f"{given.requests} requests, {rate:.1f} a second, {given.replicas} replicas")
    print("| router | hit rate | follow-ups at the last replica | max load over mean | "
          "first token p50, s | p99, s | seconds to simulate |")  # fmt: skip
    print("|---|---|---|---|---|---|---|")
    for name in given.router or makers:
        title, make = makers[name]
        began = time.perf_counter()
        one = Simulation(make(), given.replicas, rate, given.seed)
        one.run(given.requests)
        firsts = sorted(one.firsts)
        print(
            f"| {title} | {one.n_cached / one.n_prompt:.3f} | "
            f"{one.n_at_holder / max(1, one.n_follow):.3f} | {one.worst / one.n_looks:.2f} | "
            f"{firsts[len(firsts) // 2]:.2f} | {firsts[len(firsts) * 99 // 100]:.2f} | "
            f"{time.perf_counter() - began:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
