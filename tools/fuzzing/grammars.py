"""GBNF grammars at random: what llama.cpp allows next is what the constraint allows next."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

import infercore as ic
from fuzzing import Wrong
from fuzzing._llama_grammar import LlamaVocabulary, Slow
from infercore.sampling import compile_constraint, gbnf

if TYPE_CHECKING:
    from random import Random

LIMIT_S = 20.0
BATCH = 200
N_STEPS = 12
_AGAIN = 0.5  # how often the same token is taken again: repetitions have ends
RULES = ("root", "word", "ws", "item-2", "A")
LITERALS = (
    "a", "b", "ab", "ba", " ", "\\n", "é", "🙂", "\\x41", "\\u00e9", "\\U0001F600", '\\"', "\\\\",
    "\\t", "the", " the", "[", "a]", "\\[x\\]", "\\-", "", "\\r\\n", "aa",
)  # fmt: skip
CLASSES = (
    "a", "ab", "a-c", "^a", "^a-z", "a-zA-Z", " \\t\\n", "^\\n", "a-", "-a", "\\]", "^\\]",
    "\\x20-\\x7E", "\\u00e0-\\u00ff", "^\\u00e0-\\u00ff", "é🙂", "\\U0001F600-\\U0001F64F", "0-9",
    "+*/-",
    "^", "^^", "", ".", "a-a", "^\\x00-\\x1F", "ぁ-ゟ",
)  # fmt: skip
REPEATS = (
    *("",) * 5, "*", "+", "?", "{2}", "{0,2}", "{1,}", "{0}", "{0,3}", "{2,4}", "{3,}", "{ 1 , 2 }",
)  # fmt: skip
_REFUSED_SHARE = 0.01
_DEPTH = 2
_BOUNDS = re.compile(r"\{\s*(\d+)\s*,\s*(\d+)\s*\}")
SPACES = (" ", "  ", "\t", " ")
BROKEN = '"[](){}<>|*+?!.:=\\#\n\r -,0a\0\ud800'


class _Maker:
    def __init__(self, random: Random, n_vocab: int) -> None:
        self._random = random
        self._n_vocab = n_vocab
        self._names = RULES[: random.randrange(1, len(RULES) + 1)]

    def grammar(self) -> str:
        """Return a grammar; now and then one with a few characters changed."""
        r = self._random
        rules = [self._rule(name) for name in self._names]
        if r.random() < 0.3:
            r.shuffle(rules)
        text = "".join(rules)
        if r.random() < 0.15:
            for _ in range(r.randrange(1, 4)):
                at = r.randrange(len(text))
                text = text[:at] + r.choice(BROKEN) + text[at + r.randrange(2) :]
        return text

    def _rule(self, name: str) -> str:
        end = self._random.choice(("\n", "\n", "\r\n", "\n\n", " # a comment\n", " \n"))
        return f"{name} ::= {self._alternatives(_DEPTH, nested=False)}{end}"

    def _alternatives(self, depth: int, *, nested: bool) -> str:
        r = self._random
        n = r.choice((1, 1, 2, 3))
        mark = r.choice((" | ", "|", " |\n ", " |  "))
        if nested and r.random() < 0.1:
            mark = "\n" + mark
        return mark.join(self._sequence(depth) for _ in range(n))

    def _sequence(self, depth: int) -> str:
        r = self._random
        if r.random() < (0.05 if depth < _DEPTH else _REFUSED_SHARE):
            return ""
        return r.choice(SPACES).join(self._item(depth) for _ in range(r.choice((1, 1, 2, 3))))

    def _item(self, depth: int) -> str:
        r = self._random
        kind = r.randrange(12)
        if kind <= 3:
            found = f'"{r.choice(LITERALS)}"'
        elif kind <= 6:
            found = f"[{r.choice(CLASSES)}]"
        elif kind == 7:
            found = "."
        elif kind == 8 and r.random() < 0.3:
            token = r.randrange(self._n_vocab + 2)
            found = f"{r.choice(('', '!'))}<[{token}]>"
        elif kind in (9, 10) and depth > 0:
            found = f"({r.choice(('', ' '))}{self._alternatives(depth - 1, nested=True)})"
        else:
            found = f'"{r.choice("abc")}" {r.choice(self._names)}' if depth else '"c"'
        repeat = r.choice(REPEATS)
        if r.random() < _REFUSED_SHARE:
            repeat = r.choice(("{,3}", "{}", "**"))
        elif found in ('""', "[]"):
            repeat = ""  # nothing that could be repeated
        return found + r.choice(("", "", " ")) + repeat


class Grammars:
    """Compares the tokens allowed, step by step, with llama.cpp's own."""

    def __init__(self) -> None:
        import infercore_models  # noqa: PLC0415

        path = infercore_models.path("storyteller", "gguf-f32")
        self._llama = LlamaVocabulary(str(path))
        self._model = ic.load_model(path, backend="llamacpp")
        self._tokenizer = self._model.tokenizer
        self._texts = {i for i in range(self._llama.n_vocab) if self._is_text(i)}
        self._ends = {i for i in range(self._llama.n_vocab) if self._tokenizer.is_eog(i)}

    def _is_text(self, token: int) -> bool:
        """Whether the token is whole characters: llama.cpp only guesses about parts of them."""
        data = self._tokenizer.token_bytes(token)
        if self._tokenizer.is_control(token) or not data or b"\0" in data:
            return False
        try:
            data.decode()
        except UnicodeDecodeError:
            return False
        return True

    def case(self, random: Random) -> str:
        """Compile and compare."""
        text = _Maker(random, self._llama.n_vocab).grammar()
        if any(int(low) > int(high) for low, high in _BOUNDS.findall(text)):
            return "llama.cpp does not end"
        theirs = None
        try:
            theirs = None if _is_no_text(text) else self._llama.open(text)
            try:
                ours = compile_constraint({"type": "gbnf", "grammar": text}, self._tokenizer)
                if any(gbnf.endless(gbnf.read(text)).values()):
                    return "parts never end: llama.cpp goes into them, and never comes out"
            except ic.GrammarError as error:
                if theirs is not None and not _is_ours_to_refuse(str(error)):
                    raise Wrong(f"refused, and llama.cpp takes it: {error}\n{text!r}") from error
                raise
            return self._compared(random, text, ours, theirs) if theirs else "llama.cpp refuses"
        except Slow as error:
            return f"{text}: {error}"
        finally:
            if theirs is not None:
                theirs.close()

    def _compared(self, random: Random, text: str, ours: Any, theirs: Any) -> str:
        taken: list[int] = []
        for _ in range(N_STEPS):
            wanted = theirs.allowed()
            found = set(ours.allowed().nonzero()[0].tolist())
            self._check(wanted, found | _also_taken(ours, wanted & self._texts), taken, text)
            ways = sorted(wanted & found & self._texts)
            if not ways:
                break
            token = taken[-1] if taken and taken[-1] in ways and random.random() < _AGAIN else (
                random.choice(ways)
            )  # fmt: skip
            ours.accept(token)
            theirs.accept(token)
            taken.append(token)
        return f"{text}: {b''.join(map(self._tokenizer.token_bytes, taken))!r}"

    def _check(self, wanted: set[int], found: set[int], taken: list[int], text: str) -> None:
        if "<[" in text:  # llama.cpp allows tokens that it then ends the process on
            if not found & self._texts <= wanted:
                raise Wrong(f"after {taken}: more than llama.cpp allows in {text!r}")
            return
        if wanted & self._texts != found & self._texts:
            differ = sorted((wanted ^ found) & self._texts)[:5]
            pieces = [
                (token, self._tokenizer.token_bytes(token), token in wanted) for token in differ
            ]
            raise Wrong(f"after {taken}: (token, bytes, allowed by llama.cpp) {pieces} in {text!r}")
        if bool(wanted & self._ends) != bool(found & self._ends):
            end = bool(wanted & self._ends)
            raise Wrong(f"after {taken}: llama.cpp's text may end: {end}; in {text!r}")


def _also_taken(ours: Any, tokens: set[int]) -> set[int]:
    """Return what is accepted of ``tokens``: where bytes are forced, the mask has one token."""
    found = set()
    if not 0 < len(tokens - set(ours.allowed().nonzero()[0].tolist())) < 100:
        return found
    for token in tokens:
        with contextlib.suppress(ic.InvalidInputError):
            ours.clone().accept(token)
            found.add(token)
    return found


def _is_no_text(text: str) -> bool:
    """What llama.cpp cannot be given: its own strings end at NUL, and are UTF-8."""
    return "\0" in text or any("\ud800" <= char <= "\udfff" for char in text)


def _is_ours_to_refuse(message: str) -> bool:
    """What llama.cpp reads and nothing could ever match, or what it would not survive."""
    return any(why in message for why in (
        "holds no character", "matches no character of a text", "end-of-generation token",
        "upper bound is below", "the vocabulary has", "begins with itself", "never ends",
    ))  # fmt: skip


def open_target() -> Grammars:
    """Return the target."""
    return Grammars()
