"""Which replica a request goes to, decided without Ray."""

from __future__ import annotations

import math
import random

from infercore_ray.blocks import BLOCK_TOKENS, blocks_held, blocks_of
from infercore_ray.routing import PrefixRouting


def each(_: object) -> bool:
    return True


def routing(*names: str) -> PrefixRouting:
    made = PrefixRouting()
    made.keep(names)
    return made


def test_blocks_stand_for_all_that_is_before_them() -> None:
    tokens = list(range(3 * BLOCK_TOKENS + 5))
    blocks = blocks_of("", tokens)
    assert len(blocks) == 3
    assert blocks_of("", tokens[: 2 * BLOCK_TOKENS]) == blocks[:2]
    assert blocks_of("other", tokens)[0] != blocks[0]
    other = blocks_of("", [7, *tokens[1:]])
    assert not set(other) & set(blocks)
    assert not blocks_of("", tokens[: BLOCK_TOKENS - 1])


def test_blocks_held_are_those_of_what_is_asked() -> None:
    from hashlib import sha256

    tokens = tuple(range(200))
    held = blocks_held([(sha256(b"own").digest(), tokens), (sha256(b"").digest(), tokens)])
    assert set(blocks_of("own", tokens)) <= set(held)
    assert len(held) == 6


def test_who_holds_most_is_chosen() -> None:
    made = routing("a", "b", "c")
    blocks = blocks_of("", range(400))
    made.report("a", blocks[:2], 0, each)
    made.report("b", blocks, 0, each)
    assert made.choose(blocks)[0] == "b"
    assert made.choose(blocks)[1] == "a"


def test_few_blocks_are_evaluated_elsewhere_rather_than_beside_many_calls() -> None:
    made = routing("a", "b", "c", "d")
    blocks = blocks_of("", range(640))
    made.report("a", blocks[:2], 0, each)
    for name in "abcd":
        made.heard(name, 4)
    assert made.choose(blocks)[0] == "a"
    made.heard("b", 1)
    assert made.choose(blocks)[0] == "b"  # two blocks more, three calls fewer
    made.report("a", blocks, 4, each)
    assert made.choose(blocks)[0] == "a"


def test_a_gap_ends_what_is_held() -> None:
    made = routing("a", "b")
    blocks = blocks_of("", range(400))
    made.report("a", blocks[1:], 0, each)
    made.report("b", blocks[:1], 0, each)
    assert made.choose(blocks)[0] == "b"


def test_what_a_report_no_longer_names_is_forgotten() -> None:
    made = routing("a", "b")
    blocks = blocks_of("", range(400))
    made.sent("a", blocks, 1)
    for ended in (set(), {2}, {7, 8}):  # reports that were on their way, however many
        made.report("a", (), 0, ended.__contains__)
        assert made.n_held("a", blocks) == len(blocks)
    made.report("a", (), 0, {1}.__contains__)
    assert made.n_held("a", blocks) == 0


def test_what_was_sent_is_remembered_only_so_far() -> None:
    made = routing("a")
    first, *others = (blocks_of(str(number), range(64 * 400)) for number in range(170))
    made.holds("a", first)
    for blocks in others:
        made.holds("a", blocks)
    assert made.n_held("a", first) == 0
    assert made.n_held("a", others[-1]) == 400


def test_a_conversation_stays_where_it_is_within_the_bound() -> None:
    made = routing("a", "b")
    blocks = blocks_of("", range(400))
    made.report("b", blocks, 0, each)
    assert made.choose(blocks, at="a")[0] == "a"
    made.report("a", (), 5, each)
    assert made.choose(blocks, at="a") == ["b"]


def test_no_replica_gets_beyond_the_bound() -> None:
    draw = random.Random(3)
    names = [f"r{n}" for n in range(16)]
    made = routing(*names)
    shared = blocks_of("", range(640))
    running: list[str] = []
    for _ in range(4000):
        if running and draw.random() < 0.45:
            made.ended(running.pop(draw.randrange(len(running))))
            continue
        name = made.choose(shared)[0]
        made.sent(name, shared)
        running.append(name)
        mean = len(running) / len(names)
        assert running.count(name) <= max(math.ceil(1.25 * mean), math.ceil(mean) + 1)


def test_few_requests_need_not_move() -> None:
    made = routing("a", "b")
    blocks = blocks_of("", range(400))
    made.report("b", blocks, 0, each)
    made.sent("b")
    assert made.choose(blocks)[0] == "b"  # 2 of 2: one more than the mean
    made.sent("b")
    assert made.choose(blocks) == ["b", "a"]
    made.sent("b")
    assert made.choose(blocks) == ["a"]
    made.ended("b")
    assert made.choose(blocks)[0] == "b"


def test_what_others_have_done_counts_until_the_next_report() -> None:
    made = routing("a", "b")
    made.sent("a")
    made.report("a", (), 4, each)
    assert made.load("a") == 5
    made.report("a", (), 0, each)
    assert made.load("a") == 1
    made.ended("a")
    made.ended("a")
    assert made.load("a") == 0


def test_routers_agree_on_a_new_prefix_and_spread_different_ones() -> None:
    names = [f"r{n}" for n in range(8)]
    firsts = set()
    for number in range(64):
        blocks = blocks_of("", range(number, number + 128))
        chosen = {routing(*order).choose(blocks)[0] for order in (names, names[::-1])}
        assert len(chosen) == 1
        firsts |= chosen
    assert len(firsts) == 8


def test_replicas_that_are_gone_are_never_chosen() -> None:
    made = routing("a", "b")
    blocks = blocks_of("", range(400))
    made.report("a", blocks, 0, each)
    made.keep(["b", "c"])
    assert set(made.choose(blocks)) == {"b", "c"}
    made.ended("a")
    made.sent("a", blocks)
    assert "a" not in made.choose(blocks)
    assert PrefixRouting().choose(blocks) == []
