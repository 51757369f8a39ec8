"""Text to token ids and back."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from infercore.conformance.expect import equal, raises, that
from infercore.conformance.holding import switching_often
from infercore.conformance.law import law
from infercore.errors import InvalidInputError, InvalidTokenError

if TYPE_CHECKING:
    from infercore.conformance.rig import Rig

BAD_TOKENS = (-1, 2**31, 2**70, 1.5, "a", None, True)
BAD_TEXTS = ("\ud800", 5, None, b"bytes", ["list"])
_TIMES = 300
"""How often each thread asks a tokenizer."""


def _plain(rig: Rig, text: str) -> list[int]:
    ids: list[int] = rig.tokenizer.encode(text, add_special=False, parse_special=False)
    return ids


@law("TOK-1")
def check_round_trip(rig: Rig) -> None:
    """Decoding the ids of a text gives the text, whatever is in it."""
    for text in rig.texts:
        equal(rig.tokenizer.decode(_plain(rig, text)), text, "the text after a round trip")


@law("TOK-2")
def check_ids_are_in_the_vocabulary(rig: Rig) -> None:
    """Token ids are ints from 0 to n_vocab - 1, given as a list."""
    n_vocab = rig.tokenizer.n_vocab
    for text in (rig.story, *rig.texts):
        ids = rig.tokenizer.encode(text)
        that(type(ids) is list, f"encode returned a {type(ids).__name__}")
        wrong = [t for t in ids if type(t) is not int or not 0 <= t < n_vocab]
        equal(wrong, [], "ids outside the vocabulary")


@law("TOK-3")
def check_text_is_made_of_bytes(rig: Rig) -> None:
    """The bytes of the tokens, joined, are those of the text.

    Decoded, bytes that are no UTF-8 by themselves become U+FFFD.
    """
    for text in (rig.passage(20), *rig.texts):
        ids = _plain(rig, text)
        data = b"".join(rig.tokenizer.token_bytes(token) for token in ids)
        equal(data, text.encode(), f"bytes of {text!r}")
    ids = _plain(rig, "\u00e9\u2603\u65e5\U0001f600")
    for n in range(1, len(ids)):
        data = b"".join(map(rig.tokenizer.token_bytes, ids[:n]))
        is_whole = "\ufffd" not in data.decode(errors="replace")
        found = rig.tokenizer.decode(ids[:n])
        that(is_whole == ("\ufffd" not in found), f"{data!r} is decoded as {found!r}")


@law("TOK-4")
def check_special_tokens_are_added_on_request(rig: Rig) -> None:
    """Only add_special adds control tokens, around the same ids."""
    text = rig.passage(10)
    bare = rig.tokenizer.encode(text, add_special=False)
    full = rig.tokenizer.encode(text, add_special=True)
    equal([t for t in bare if rig.tokenizer.is_control(t)], [], "control tokens in plain text")
    middle = [t for t in full if not rig.tokenizer.is_control(t)]
    equal(middle, bare, "ids between the control tokens")


@law("TOK-5")
def check_control_text_is_parsed_on_request(rig: Rig) -> None:
    """The text of a control token becomes that token only with parse_special."""
    tokenizer = rig.tokenizer
    ends = (tokenizer.eot, tokenizer.eos, tokenizer.bos)
    token = next((t for t in ends if t is not None and tokenizer.is_control(t)), None)
    if token is None:
        rig.leave("the vocabulary has no control token")
    name = tokenizer.token_bytes(token).decode()
    equal(tokenizer.encode(name, add_special=False), [token], "ids with parse_special")
    that(token not in _plain(rig, name), "the text of a control token was parsed unasked")
    equal(tokenizer.decode(_plain(rig, name)), name, "the control token's text as text")


@law("TOK-6")
def check_bad_ids_are_refused(rig: Rig) -> None:
    """An id outside the vocabulary raises InvalidTokenError everywhere."""
    tokenizer = rig.tokenizer
    for token in (*BAD_TOKENS, tokenizer.n_vocab):
        for name, call in {
            "decode": lambda bad=token: tokenizer.decode([bad]),
            "token_bytes": lambda bad=token: tokenizer.token_bytes(bad),
            "is_eog": lambda bad=token: tokenizer.is_eog(bad),
            "is_control": lambda bad=token: tokenizer.is_control(bad),
        }.items():
            raises(InvalidTokenError, call, f"{name} of token {token!r}")


@law("TOK-7")
def check_what_is_no_text_is_refused(rig: Rig) -> None:
    """A value that is not a str, or holds lone surrogates, raises InvalidInputError."""
    for text in BAD_TEXTS:
        raises(InvalidInputError, lambda t=text: rig.tokenizer.encode(t), f"encode({text!r})")


@law("TOK-8")
def check_ends_are_ends(rig: Rig) -> None:
    """Eos and eot end a generation, bos does not; tokens of plain text neither end nor control."""
    tokenizer = rig.tokenizer
    for name in ("eos", "eot"):
        token = getattr(tokenizer, name)
        that(token is None or tokenizer.is_eog(token), f"{name} does not end a generation")
    for token in rig.tokens(20):
        that(not tokenizer.is_eog(token), f"token {token} of plain text ends a generation")
        that(not tokenizer.is_control(token), f"token {token} of plain text is control")


@law("TOK-9")
def check_skip_special_drops_control_tokens(rig: Rig) -> None:
    """Decoding with skip_special leaves out control tokens and nothing else."""
    tokenizer = rig.tokenizer
    control = next(
        (t for t in (tokenizer.bos, tokenizer.eos) if t is not None and tokenizer.is_control(t)),
        None,
    )
    if control is None:
        rig.leave("the vocabulary has no control token")
    ids = rig.tokens(6)
    mixed = [control, *ids[:3], control, *ids[3:]]
    found, shown = (tokenizer.decode(mixed, skip_special=skip) for skip in (True, False))
    without = shown.replace(tokenizer.decode([control], skip_special=False), "")
    may = (tokenizer.decode(ids), without)  # with the space that begins a text, or without
    that(found in may, f"{found!r} is the text without control tokens, not {may[0]!r}")


@law("TOK-10")
def check_nothing_is_nothing(rig: Rig) -> None:
    """An empty text has no tokens, and an empty list of tokens has no text."""
    equal(rig.tokenizer.encode("", add_special=False), [], "the ids of no text")
    equal(rig.tokenizer.decode([]), "", "the text of no ids")


@law("TOK-11")
def check_a_tokenizer_in_threads(rig: Rig) -> None:
    """Many threads may use a tokenizer at once, and ask it for different things."""
    encoders = [] if rig.encoder is None else [rig.encoder_model.tokenizer]
    for each in (rig.tokenizer, *encoders):
        controls = (token for token in range(each.n_vocab) if each.is_control(token))
        names = b"".join(map(each.token_bytes, itertools.islice(controls, 3)))
        texts = [rig.passage(n) + names.decode(errors="replace") for n in (3, 6)]
        ways = itertools.product(texts, (True, False), (True, False))
        _check_at_once(
            [
                partial(each.encode, text, parse_special=parsed, add_special=added)
                for text, parsed, added in ways
            ]
        )
        ids = each.encode(rig.passage(6))
        _check_at_once([partial(each.decode, ids[:n]) for n in (len(ids), 3, len(ids) - 2, 5)])


def _check_at_once(asked: list[partial[Any]]) -> None:
    """Each call returns what it does alone while others are made in other threads."""
    alone = [call() for call in asked]

    def work(first: int) -> None:
        for n in range(first, first + _TIMES):
            call, expected = asked[n % len(asked)], alone[n % len(asked)]
            equal(
                call(), expected, f"{call.func.__name__} in threads: {call.args}, {call.keywords}"
            )

    with switching_often(), ThreadPoolExecutor(len(asked)) as pool:
        list(pool.map(work, range(len(asked))))


@law("TOK-12", needs="chat_template")
def check_chat_template(rig: Rig) -> None:
    """A chat template renders every message's text in order, and asks for an answer at the end."""
    messages = [
        {"role": "user", "content": "first words"},
        {"role": "assistant", "content": "second words"},
        {"role": "user", "content": "third words"},
    ]
    render = rig.tokenizer.apply_chat_template
    text = render(messages)
    places = [text.find(message["content"]) for message in messages]
    that(-1 not in places and places == sorted(places), f"messages at {places} of the render")
    bare = render(messages, add_generation_prompt=False)
    that(text.startswith(bare), "the generation prompt changes what stands before it")


@law("TOK-13", needs="chat_template")
def check_messages_that_are_none(rig: Rig) -> None:
    """Values that are not messages raise InvalidInputError."""
    for messages in ("text", [5], [{"content": "no role"}]):
        raises(
            InvalidInputError,
            lambda given=messages: rig.tokenizer.apply_chat_template(given),
            f"apply_chat_template({messages!r})",
        )


@law("TOK-14")
def check_digest_is_of_the_vocabulary(rig: Rig) -> None:
    """The tokenizer's digest is SHA-256 hex and the same for the model loaded again."""
    digest = rig.tokenizer.digest
    that(len(digest) == 64 and set(digest) <= set("0123456789abcdef"), f"digest {digest!r}")  # noqa: PLR2004
    equal(rig.another_model().tokenizer.digest, digest, "the digest of the model loaded again")


@law("TOK-15", since="1.2")
def check_every_control_token(rig: Rig) -> None:
    """A control token cannot be typed: its text stays text unless parsing is requested."""
    tokenizer = rig.tokenizer
    found = [t for t in range(tokenizer.n_vocab) if tokenizer.is_control(t)]
    for token in found[:200]:
        name = tokenizer.token_bytes(token).decode("utf-8", "replace")
        if not name:
            continue
        text = f"a{name}b"
        plain = tokenizer.encode(text, add_special=False, parse_special=False)
        equal([t for t in plain if tokenizer.is_control(t)], [], f"control tokens of {text!r}")
        equal(tokenizer.decode(plain), text, f"{text!r} as text")
        equal(tokenizer.decode([token], skip_special=True), "", f"{name!r} left out")


@law("TOK-16", since="1.2")
def check_the_vocabulary_is_the_files(rig: Rig) -> None:
    """Bytes, control and end tokens, ids of texts and rendered chats are those of the files."""
    from infercore.testing import load_reference_model  # noqa: PLC0415  (an engine in itself)

    rig.need_oracle()
    with load_reference_model(rig.oracle_path()) as model:
        files, own = model.tokenizer, rig.tokenizer
        equal(own.n_vocab, files.n_vocab, "n_vocab")
        for token in range(own.n_vocab):
            told = (own.token_bytes(token), own.is_control(token), own.is_eog(token))
            kept = (files.token_bytes(token), files.is_control(token), files.is_eog(token))
            equal(told, kept, f"bytes, control and end of token {token}")
        equal((own.bos, own.eos, own.eot), (files.bos, files.eos, files.eot), "bos, eos and eot")
        long = "\n\n".join([rig.story, *rig.texts] * 3)
        for text in (rig.story, *rig.texts, *TEXTS, long):
            equal(own.encode(text), files.encode(text), f"ids of {text[:60]!r}")
        messages = [{"role": "user", "content": "a \n b"}, {"role": "assistant", "content": "c"}]
        if files.chat_template is not None:
            rendered = files.apply_chat_template(messages)
            equal(own.apply_chat_template(messages), rendered, "a rendered chat")


@law("TOK-17", since="1.2")
def check_long_and_blank_texts(rig: Rig) -> None:
    """Runs of blanks, newlines at both ends, code, a byte-order mark and long texts survive."""
    units = (" ", "\n", "\t", "\r\n", "-", "\u00e9")
    runs = [f"{unit * n}a{unit * n}b{unit * n}" for unit in units for n in (1, 2, 3, 4, 7)]
    for text in (*TEXTS, *runs, _any_characters(rig), " ".join([rig.story] * 8)):
        ids = _plain(rig, text)
        equal(rig.tokenizer.decode(ids), text, f"text of {text[:60]!r}")
        data = b"".join(rig.tokenizer.token_bytes(token) for token in ids)
        equal(data, text.encode(), f"bytes of {text[:60]!r}")


def _any_characters(rig: Rig) -> str:
    """Return a text of characters from all over Unicode, each of which stands for itself."""
    drawn = (rig.random.choice((0x7F, 0x7FF, 0xFFFF, 0x10FFFF)) for _ in range(200))
    points = (rig.random.randint(1, most) for most in drawn)
    return "".join(chr(at) for at in points if not 0xD800 <= at < 0xE000)  # noqa: PLR2004


TEXTS = (
    "a        b",
    "\n\n\na\n\n",
    "    def f(x):\n        return x  # twice\n\n\n\tpass",
    "\ufeffa mark before",
    "\ufb01 \uff46\uff55\uff4c\uff4c ² ½ \u212b",
    "Yes , it is . No !  ' s don 't",
    " ",
    "\n",
    "\t \t",
    "a\u00a0b\u2003c",
)


@law("TOK-19", since="1.2")
def check_kinds_scores_and_many_texts(rig: Rig) -> None:
    """Control tokens have that kind; texts in a batch encode as if alone; a pair holds both."""
    tokenizer = rig.tokenizer
    for token in range(min(tokenizer.n_vocab, _SOME)):
        control = tokenizer.token_kind(token) == "control"
        equal(control, tokenizer.is_control(token), f"whether token {token} is a control token")
    texts = [rig.story[:40], rig.story[40:60]]
    found = tokenizer.encode_many(texts)
    equal(found, [tokenizer.encode(text) for text in texts], "many texts")
    (pair,) = tokenizer.encode_many([(texts[0], texts[1])])
    first, second = (_plain(rig, text) for text in texts)
    begin = found[0][: found[0].index(first[0])]
    equal(pair[: len(begin) + len(first)], [*begin, *first], "the first text of a pair")
    places = range(len(begin) + len(first), len(pair) - len(second) + 1)
    inside = [at for at in places if pair[at : at + len(second)] == second]
    that(bool(inside), "the second text of a pair is not in it")
    rest = pair[len(begin) + len(first) : inside[0]] + pair[inside[0] + len(second) :]
    equal([t for t in rest if not tokenizer.is_control(t)], [], "text that no one gave")


_SOME = 2000
