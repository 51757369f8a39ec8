from __future__ import annotations

import gc

from infercore.sampling.per_tokenizer import PerTokenizer


class Anything:
    """Equal to all others, as attrs classes can be; yet each is its own tokenizer."""

    def __eq__(self, other):
        return True

    __hash__ = None


class Slotted:
    __slots__ = ()


def test_one_table_for_each_object_and_arguments():
    made = []
    table = PerTokenizer(lambda tokenizer, *args, **kwargs: made.append((args, kwargs)) or object())
    one, other = Anything(), Anything()
    assert table(one, 1) is table(one, 1)
    assert table(one, 1) is not table(one, 2)
    assert table(one, 1) is not table(other, 1)
    assert table(one, 1, key=2) is table(one, 1, key=2)
    assert len(made) == 4


def test_a_dead_tokenizer_is_forgotten():
    table = PerTokenizer(lambda _: object())
    tokenizer = Anything()
    table(tokenizer)
    del tokenizer
    gc.collect()
    assert table._known == {}


def test_a_number_that_was_given_again_is_no_match():
    table = PerTokenizer(lambda _: object())
    dead, tokenizer = Anything(), Anything()
    stale = table(dead)
    table._known[id(tokenizer)] = table._known[id(dead)]
    assert table(tokenizer) is not stale


def test_one_that_takes_no_weak_reference_is_made_anew():
    table = PerTokenizer(lambda _: object())
    tokenizer = Slotted()
    assert table(tokenizer) is not table(tokenizer)
