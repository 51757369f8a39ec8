"""The prefix index against a model that is a dict of lists."""

from __future__ import annotations

import time

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from infercore.session.prefix_index import Match, PrefixIndex
from infercore.session.tape import common_prefix

TOKENS = st.lists(st.integers(0, 2), max_size=12)
HOLDERS = st.integers(0, 5)
KEYS = st.sampled_from(["", "a", ("a", "adapter")])


class Machine(RuleBasedStateMachine):
    """Any order of calls; the naive model keeps each holder's tokens as a list."""

    def __init__(self) -> None:
        super().__init__()
        self.index: PrefixIndex[int] = PrefixIndex()
        self.held: dict[int, tuple[object, list[int]]] = {}

    @rule(holder=HOLDERS, key=KEYS, tokens=TOKENS)
    def put(self, holder: int, key: object, tokens: list[int]) -> None:
        self.index.put(holder, key, tokens)
        self.held[holder] = (key, tokens)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), tokens=TOKENS)
    def extend(self, data: st.DataObject, tokens: list[int]) -> None:
        holder = data.draw(st.sampled_from(list(self.held)))
        self.index.extend(holder, tokens)
        key, before = self.held[holder]
        self.held[holder] = (key, before + tokens)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), n=st.integers(0, 30))
    def cut(self, data: st.DataObject, n: int) -> None:
        holder = data.draw(st.sampled_from(list(self.held)))
        self.index.cut(holder, n)
        key, before = self.held[holder]
        self.held[holder] = (key, before[:n])

    @rule(holder=HOLDERS)
    def drop(self, holder: int) -> None:
        self.index.drop(holder)
        self.held.pop(holder, None)

    @rule(key=KEYS, tokens=TOKENS, but=HOLDERS)
    def find(self, key: object, tokens: list[int], but: int) -> None:
        best = 0
        for holder, (of, held) in self.held.items():
            if of == key and holder != but:
                best = max(best, common_prefix(held, tokens))
        found = self.index.find(key, tokens, but=but)
        assert (0 if found is None else found.n_tokens) == best
        if found is not None:
            of, held = self.held[found.holder]
            assert of == key
            assert found.holder != but
            assert held[:best] == tokens[:best]

    @rule(key=KEYS, tokens=TOKENS)
    def inside(self, key: object, tokens: list[int]) -> None:
        expected = {
            (holder, len(held))
            for holder, (of, held) in self.held.items()
            if of == key and tokens[: len(held)] == held
        }
        found = self.index.inside(key, tokens)
        assert {(match.holder, match.n_tokens) for match in found} == expected
        assert [match.n_tokens for match in found] == sorted(n for _, n in expected)

    @invariant()
    def holds_what_was_told(self) -> None:
        assert len(self.index) == len(self.held)
        for holder, (_, held) in self.held.items():
            assert self.index.tokens(holder) == held
            assert self.index.n_held(holder) == len(held)

    @invariant()
    def nodes_are_few(self) -> None:
        """A tree of n holders has at most 2n nodes, but for labels that lie in two buffers."""
        assert _n_nodes(self.index) <= 2 * sum(1 + len(t) for _, t in self.held.values())


def _n_nodes(index: PrefixIndex[int]) -> int:
    n, nodes = 0, list(index._roots.values())
    while nodes:
        node = nodes.pop()
        n += 1
        assert all(child.parent is node for child in node.children.values())
        assert all(child.start == node.end for child in node.children.values())
        nodes += node.children.values()
    return n


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPrefixIndex = Machine.TestCase


def test_two_that_grow_in_step_stay_one_path() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    index.put("a", "", range(100))
    index.put("b", "", range(50))
    for token in range(50, 4000):
        index.extend("b", [token])
        index.extend("a", [token + 50])
    assert index.find("", list(range(5000)), but="a") == Match("b", 4000)
    assert _n_nodes(index) == 3


def test_a_key_is_never_found_from_another() -> None:
    index: PrefixIndex[int] = PrefixIndex()
    index.put(1, ("tenant", (), "digest"), [1, 2, 3])
    assert index.find(("other", (), "digest"), [1, 2, 3]) is None
    assert index.find(("tenant", ("lora",), "digest"), [1, 2, 3]) is None
    assert index.find(("tenant", (), "digest"), [1, 2, 3, 4]) == Match(1, 3)


def test_time_grows_with_the_tokens_and_not_with_the_holders() -> None:
    def elapsed(n_holders: int) -> float:
        index: PrefixIndex[int] = PrefixIndex()
        for holder in range(n_holders):
            index.put(holder, "", [*range(2000), holder + 10_000])
        text = [*range(2000), 7]
        best = float("inf")
        for _ in range(5):
            begin = time.process_time()
            for _ in range(20):
                index.put(-1, "", text)
                index.find("", text, but=-1)
                index.drop(-1)
            best = min(best, time.process_time() - begin)
        return best

    assert elapsed(800) < 8 * elapsed(8)


def test_eight_of_eight_thousand_tokens_take_microseconds_each() -> None:
    index: PrefixIndex[int] = PrefixIndex()
    for holder in range(8):
        index.put(holder, "", [holder])
    begin = time.process_time()
    for token in range(8000):
        for holder in range(8):
            index.extend(holder, [token])
    assert (time.process_time() - begin) / 64_000 < 20e-6
    begin = time.process_time()
    index.cut(3, 100)
    index.drop(4)
    assert time.process_time() - begin < 1e-3
