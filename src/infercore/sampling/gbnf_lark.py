"""Writes GBNF as llguidance's Lark, with the same meaning.

llguidance reads a text by lexemes and takes the longest. So every lexeme written here is a single
character: then none is the beginning of another, and what may follow is the rules' business alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from infercore.sampling import gbnf
from infercore.sampling.eog import eog_ids
from infercore.sampling.gbnf import Chars, Group, Ref, Repeat, Token

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infercore.protocols.public import Tokenizer
    from infercore.sampling.gbnf import Item


def lark_of(source: str, tokenizer: Tokenizer) -> str:
    """Return the grammar ``source`` in llguidance's Lark. Raises `GrammarError`, naming the place.

    ``tokenizer`` knows the tokens that the grammar names.
    """
    return _Writer(source, gbnf.read(source), tokenizer).text()


class _Writer:
    def __init__(self, source: str, rules: Mapping[str, Group], tokenizer: Tokenizer) -> None:
        self._source = source
        self._rules = rules
        self._tokenizer = tokenizer
        self._names = {name: f"rule_{i}" for i, name in enumerate(rules)}
        self._terminals: dict[str, str] = {}

    def text(self) -> str:
        lines = [
            f"{self._names[name]}: {self._written(rule)}" for name, rule in self._rules.items()
        ]
        terminals = [f"{name}: /{pattern}/" for pattern, name in self._terminals.items()]
        return "\n".join([f"start: {self._names['root']}", *lines, *terminals])

    def _written(self, item: Item) -> str:
        if isinstance(item, Chars):
            name = f"CHAR_{len(self._terminals)}"
            return self._terminals.setdefault(_pattern(item), name)
        if isinstance(item, Ref):
            return self._names[item.name]
        if isinstance(item, Token):
            return self._token(item)
        if isinstance(item, Repeat):
            return f"({self._written(item.item)}){_quantifier(item)}"
        sequences = (" ".join(map(self._written, seq)) or '""' for seq in item.alternatives)
        return "(" + " | ".join(sequences) + ")"

    def _token(self, item: Token) -> str:
        n_vocab = self._tokenizer.n_vocab
        token = item.name if isinstance(item.name, int) else self._id_of(item.name, item.at)
        ends = set(eog_ids(self._tokenizer).tolist())
        if token >= n_vocab:
            gbnf.refuse(self._source, item.at, f"the vocabulary has {n_vocab} tokens")
        if item.negated:
            allowed = sorted(set(range(n_vocab)) - ends - {token})
            return f"<[{_spans(allowed)}]>"
        if token in ends:
            gbnf.refuse(self._source, item.at, "an end-of-generation token ends the text, and "
                        "cannot stand within it")  # fmt: skip
        return f"<[{token}]>"

    def _id_of(self, text: str, at: int) -> int:
        tokens = self._tokenizer.encode(text, add_special=False, parse_special=True)
        if len(tokens) != 1:
            gbnf.refuse(self._source, at, f"{text} is {len(tokens)} tokens, not one")
        return int(tokens[0])


def _pattern(chars: Chars) -> str:
    parts = (_escaped(low) if low == high else f"{_escaped(low)}-{_escaped(high)}"
             for low, high in sorted(chars.ranges))  # fmt: skip
    return f"[{''.join(parts)}]"


def _escaped(code: int) -> str:
    return f"\\u{{{code:x}}}"


def _quantifier(item: Repeat) -> str:
    known = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    high = "" if item.high is None else item.high
    return known.get((item.low, item.high), f"{{{item.low},{high}}}")


def _spans(ids: list[int]) -> str:
    spans: list[list[int]] = []
    for token in ids:
        if spans and spans[-1][1] == token - 1:
            spans[-1][1] = token
        else:
            spans.append([token, token])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in spans)
