"""Where prefix and suffix meet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infercore.conformance.expect import equal, raises, that
from infercore.conformance.law import law
from infercore.conformance.rig import greedy
from infercore.errors import InvalidInputError, InvalidTokenError
from infercore.values.manifest import hash_token_ids
from infercore.values.session import PrefixInput, SuffixInput

if TYPE_CHECKING:
    from infercore.conformance.rig import Rig

WHOLE = "Once upon a time there was a baker"


@law("SEAM-1", tier="session")
def check_joint_tokens(rig: Rig) -> None:
    """Wherever a text is cut, the tokens are those of the whole text."""
    session = rig.session()
    context = rig.inner(session)
    ids = rig.tokenizer.encode(WHOLE)
    for cut in range(1, len(WHOLE)):
        session.ensure_prefix(WHOLE[:cut])
        status = session.prefill_suffix(WHOLE[cut:])
        equal(context.tokens()[: status.resident_tokens], ids, f"tokens cut at {cut}")


@law("SEAM-2", tier="session")
def check_split_tokens(rig: Rig) -> None:
    """boundary="split" tokenizes prefix and suffix separately."""
    session = rig.session()
    context = rig.inner(session)
    encode = rig.tokenizer.encode
    for cut in range(3, len(WHOLE), 5):
        session.ensure_prefix(WHOLE[:cut])
        status = session.prefill_suffix(SuffixInput(text=WHOLE[cut:], boundary="split"))
        apart = encode(WHOLE[:cut]) + encode(WHOLE[cut:], add_special=False)
        equal(context.tokens()[: status.resident_tokens], apart, f"tokens cut at {cut}")
        equal(status.seam_tokens, 0, "tokens that gave way")


@law("SEAM-3", tier="session")
def check_the_seam_is_told(rig: Rig) -> None:
    """Prefix tokens that give way at the seam are counted, and everything adds up."""
    session = rig.session()
    ids = rig.tokenizer.encode(WHOLE)
    for cut in range(1, len(WHOLE), 3):
        n = session.ensure_prefix(WHOLE[:cut]).prefix_tokens
        status = session.prefill_suffix(WHOLE[cut:])
        equal(status.prefix_tokens + status.seam_tokens, n, f"prefix tokens cut at {cut}")
        equal(status.prefix_tokens + status.suffix_tokens, len(ids), f"all tokens cut at {cut}")
        found = status.reused_tokens + status.prefilled_tokens
        equal(found, status.suffix_tokens, f"reused + prefilled cut at {cut}")


@law("SEAM-4", tier="session")
def check_decoding_over_the_seam(rig: Rig) -> None:
    """Decoding after a seam in the middle of a word gives what a cold run gives."""
    session = rig.session()
    for cut in (len(WHOLE) - 2, len(WHOLE) // 2):
        session.ensure_prefix(WHOLE[:cut])
        session.prefill_suffix(WHOLE[cut:])
        rig.follows(rig.tokenizer.encode(WHOLE), greedy(session, 6), f"cut at {cut}")


@law("SEAM-5", tier="session")
def check_an_empty_suffix(rig: Rig) -> None:
    """An empty suffix adds nothing, and decoding can go on."""
    session, text = rig.session(), rig.passage(10)
    n = session.ensure_prefix(text).prefix_tokens
    status = session.prefill_suffix("")
    equal((status.suffix_tokens, status.resident_tokens), (0, n), "suffix and resident tokens")
    rig.follows(rig.tokenizer.encode(text), greedy(session, 5), "after an empty suffix")


@law("SEAM-6", tier="session")
def check_one_beginning(rig: Rig) -> None:
    """There is one beginning-of-sequence token, at the start, whatever the seam."""
    session = rig.session()
    context = rig.inner(session)
    session.ensure_prefix("Once upon")
    for boundary in ("joint", "split"):
        session.prefill_suffix(SuffixInput(text=" a time", boundary=boundary))
        n = rig.tokenizer.encode("Once upon a time").count(rig.tokenizer.bos)
        equal(context.tokens().count(rig.tokenizer.bos), n, f"BOS tokens with {boundary}")


@law("SEAM-7", tier="session")
def check_two_ways_to_parse(rig: Rig) -> None:
    """Prefix and suffix that differ in parse_special cannot be joined; nothing is changed."""
    session = rig.session()
    session.ensure_prefix(PrefixInput(text="Once upon", parse_special=False))
    before = session.explain_context()
    suffix = SuffixInput(text=" a time", parse_special=True)
    raises(InvalidInputError, lambda: session.prefill_suffix(suffix), "another parse_special")
    equal(session.explain_context(), before, "the report afterwards")


@law("SEAM-8", tier="session")
def check_characters_at_the_seam(rig: Rig) -> None:
    """Characters of several bytes on both sides of a seam are whole and in place."""
    session = rig.session()
    context = rig.inner(session)
    for left, right in (("né", "é"), ("語", "語🙂"), ("🙂", "🙂 end")):
        session.ensure_prefix(left)
        status = session.prefill_suffix(right)
        held = context.tokens()[: status.resident_tokens]
        text = rig.tokenizer.decode(held, skip_special=True)
        equal(text, left + right, "the text held")


@law("SEAM-9", tier="session", needs="chat_template")
def check_control_text_in_a_chat_is_text(rig: Rig) -> None:
    """The text of a control token that a user types stays text."""
    tokenizer = rig.tokenizer
    token = next((t for t in (tokenizer.eot, tokenizer.eos) if t is not None), None)
    if token is None:
        rig.leave("the vocabulary has no end token")
    name = tokenizer.token_bytes(token).decode()
    session = rig.session()
    context = rig.inner(session)
    counts = []
    for content in ("hello world", f"hello {name} world"):
        list(session.chat([{"role": "user", "content": content}], max_tokens=1, temperature=0))
        counts.append(context.tokens().count(token))
    that(counts[0] == counts[1], f"{counts[1] - counts[0]} control tokens came from a user's text")


@law("SEAM-10", tier="session", since="1.2")
def check_token_ids_are_taken_as_they_are(rig: Rig) -> None:
    """Token ids as prefix and suffix are held as given: nothing added, between, or merged."""
    encode = rig.tokenizer.encode
    session = rig.session()
    context = rig.inner(session)
    for cut in (1, len(WHOLE) // 2, len(WHOLE) - 2):
        prefix = encode(WHOLE[:cut], add_special=False)
        suffix = encode(WHOLE[cut:], add_special=False)
        status = session.ensure_prefix(prefix)
        equal(status.prefix_tokens, len(prefix), "prefix tokens")
        equal(status.stable_token_hash, hash_token_ids(prefix), "stable_token_hash")
        for given in (suffix, SuffixInput(tokens=suffix), WHOLE[cut:]):
            status = session.prefill_suffix(given)
            held = context.tokens()[: status.resident_tokens]
            equal(held, prefix + suffix, f"tokens of {type(given).__name__} cut at {cut}")
            equal(status.seam_tokens, 0, "tokens that gave way")
        rig.follows(prefix + suffix, greedy(session, 4), f"ids cut at {cut}")


@law("SEAM-11", tier="session", since="1.2")
def check_token_ids_outside_the_vocabulary(rig: Rig) -> None:
    """A token id outside the vocabulary, in a prefix or suffix, raises and changes nothing."""
    session = rig.session()
    session.ensure_prefix(rig.passage(6))
    session.prefill_suffix(" and")
    before = session.explain_context()
    good = rig.tokens(2)
    for bad in (-1, rig.tokenizer.n_vocab, 2**40, 1.5, "1", None):
        for name, call in {
            "ensure_prefix": lambda t=bad: session.ensure_prefix([*good, t]),
            "prefill_suffix": lambda t=bad: session.prefill_suffix([*good, t]),
            "append": lambda t=bad: session.prefill_suffix(
                SuffixInput(tokens=[*good, t], mode="append")
            ),
            "generate": lambda t=bad: session.generate([*good, t], max_tokens=1),
        }.items():
            raises(InvalidTokenError, call, f"{name} of token {bad!r}")
            equal(session.explain_context(), before, f"the report after {name} of {bad!r}")
