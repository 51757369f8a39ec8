"""A prefix that stays hot: what is reused, evaluated and told."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Any

import attrs

from infercore.conformance.expect import equal, raises, that
from infercore.conformance.law import law
from infercore.conformance.rig import greedy, joined
from infercore.errors import InvalidInputError, ManifestMismatchError
from infercore.values.session import PrefixInput, SuffixInput

if TYPE_CHECKING:
    from infercore.conformance.rig import Rig


def _ids(rig: Rig, *texts: str) -> list[int]:
    ids: list[int] = rig.tokenizer.encode("".join(texts))
    return ids


def _suffix(rig: Rig, n: int = 8) -> str:
    return " " + rig.passage(n)


def _add_up(status: Any, n_tokens: int, what: str) -> None:
    equal(status.reused_tokens + status.prefilled_tokens, n_tokens, f"{what}: reused + prefilled")


@law("REUSE-1", tier="session")
def check_a_cold_prefix(rig: Rig) -> None:
    """A first prefix is evaluated whole, and its status adds up."""
    text = rig.passage(20)
    status = rig.session().ensure_prefix(text)
    n = len(_ids(rig, text))
    equal((status.reused_tokens, status.prefilled_tokens), (0, n), "reused and prefilled")
    equal((status.prefix_tokens, status.suffix_tokens, status.resident_tokens), (n, 0, n), "sizes")
    equal((status.n_ctx, status.available_tokens), (rig.n_ctx, rig.n_ctx - n), "the window")
    that(status.reset_reason is None, "a first prefix has a reset reason")


@law("REUSE-2", tier="session")
def check_the_same_prefix_again(rig: Rig) -> None:
    """The same prefix again evaluates and drops nothing."""
    session, text = rig.session(), rig.passage(20)
    first = session.ensure_prefix(text)
    again = session.ensure_prefix(text)
    equal(again.reused_tokens, first.prefix_tokens, "reused tokens")
    equal((again.prefilled_tokens, again.dropped_tokens), (0, 0), "prefilled and dropped")


@law("REUSE-3", tier="session", needs="kv_remove_any")
def check_an_edited_prefix(rig: Rig) -> None:
    """An edited prefix reuses exactly the tokens it shares with the old one from the start."""
    session, start = rig.session(), rig.passage(12)
    old, new = start + " one thing", start + " another thing"
    a, b = _ids(rig, old), _ids(rig, new)
    common = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    session.ensure_prefix(old)
    status = session.ensure_prefix(new)
    equal(status.reused_tokens, common, "reused tokens")
    equal(status.dropped_tokens, len(a) - common, "dropped tokens")
    _add_up(status, len(b), "the edited prefix")
    rig.follows(b, greedy(session, 6), "after an edited prefix")


@law("REUSE-4", tier="session")
def check_a_changed_suffix_is_as_cold(rig: Rig) -> None:
    """With another suffix after the same prefix, decoding gives what a cold run gives."""
    session, text = rig.session(), rig.passage(25)
    session.ensure_prefix(text)
    for _ in range(3):
        suffix = _suffix(rig)
        again = session.ensure_prefix(text)
        _add_up(again, again.prefix_tokens, "the prefix")
        status = session.prefill_suffix(suffix)
        _add_up(status, status.suffix_tokens, "the suffix")
        rig.follows(_ids(rig, text, suffix), greedy(session, 8), "after a changed suffix")


@law("REUSE-5", tier="session")
def check_a_suffix_replaces(rig: Rig) -> None:
    """A second suffix replaces the first and what was generated."""
    session, text, last = rig.session(), rig.passage(15), _suffix(rig)
    session.ensure_prefix(text)
    session.prefill_suffix(_suffix(rig))
    greedy(session, 5)
    session.prefill_suffix(last)
    report = session.explain_context()
    ids = _ids(rig, text, last)
    equal((report.resident_tokens, report.generated_tokens), (len(ids), 0), "what is resident")
    rig.follows(ids, greedy(session, 6), "after a second suffix")


@law("REUSE-6", tier="session", needs="kv_remove_any")
def check_the_warm_tail(rig: Rig) -> None:
    """After going back to the prefix, the same suffix is reused except for at most one token."""
    session, text = rig.session(), rig.passage(15)
    suffix = SuffixInput(text=_suffix(rig), boundary="split")  # so that no token gives way
    session.ensure_prefix(text)
    session.prefill_suffix(suffix)
    greedy(session, 4)
    status = session.ensure_prefix(text)
    report = session.explain_context()
    equal(report.resident_tokens, status.prefix_tokens, "the logical context")
    that(report.warm_tail_tokens > 0, "nothing is held beyond the prefix")
    again = session.prefill_suffix(suffix)
    that(again.prefilled_tokens <= 1, f"{again.prefilled_tokens} tokens were evaluated again")


@law("REUSE-7", tier="session")
def check_claimed_reuse_is_real(rig: Rig) -> None:
    """What is reported as evaluated is what the engine itself evaluated, seen past the API."""
    observe = rig.observe
    session = rig.session()
    context = rig.inner(session)
    if observe is None or observe(context, 0).evaluated is None:
        rig.leave("the rig's observe does not tell how many tokens were evaluated")
    text = rig.passage(20)
    session.ensure_prefix(text)
    greedy(session, 3)
    for prefix in (text, text + _suffix(rig, 6), rig.passage(9)):
        before = observe(context, 0).evaluated or 0
        status = session.ensure_prefix(prefix)
        evaluated = (observe(context, 0).evaluated or 0) - before
        equal(status.prefilled_tokens, evaluated, "prefilled_tokens, beside the engine's count")


@law("REUSE-8", tier="session")
def check_residents_are_real(rig: Rig) -> None:
    """What the report calls resident is what the context holds, token by token."""
    session, text, suffix = rig.session(), rig.passage(15), _suffix(rig)
    context = rig.inner(session)
    session.ensure_prefix(text)
    session.prefill_suffix(suffix)
    made = greedy(session, 4)
    report = session.explain_context()
    held, wanted = context.tokens(), _ids(rig, text, suffix) + made
    if rig.in_pool:  # where the last token that was shown may not be evaluated yet
        equal(held, wanted[: report.held_tokens], "the tokens held")
        equal(report.resident_tokens, len(wanted), "the logical context")
        return
    equal(held[: report.resident_tokens], wanted, "the tokens held")
    equal(len(held), report.resident_tokens + report.warm_tail_tokens, "their number")
    equal(report.generated_tokens, len(made), "generated tokens")
    seen = rig.observe(context, 0).resident if rig.observe else None
    that(seen in (None, len(held)), f"the engine holds {seen} tokens, the context {len(held)}")


@law("REUSE-9", tier="session")
def check_the_prefix_drops_what_followed(rig: Rig) -> None:
    """ensure_prefix takes suffix and generated tokens out of the context."""
    session, text = rig.session(), rig.passage(12)
    session.ensure_prefix(text)
    session.prefill_suffix(_suffix(rig))
    greedy(session, 3)
    session.ensure_prefix(text)
    report = session.explain_context()
    equal((report.suffix_tokens, report.generated_tokens), (0, 0), "suffix and generated tokens")
    rig.follows(_ids(rig, text), greedy(session, 6), "from the prefix alone")


@law("REUSE-10", tier="session")
def check_hashes_of_the_prefix(rig: Rig) -> None:
    """The hashes are SHA-256 of the text and of its ids, in statuses and report."""
    session, text = rig.session(), rig.passage(10)
    status = session.ensure_prefix(text)
    of_text = hashlib.sha256(text.encode()).hexdigest()
    ids = b"".join(token.to_bytes(8, "little") for token in _ids(rig, text))
    of_ids = hashlib.sha256(ids).hexdigest()
    after = session.prefill_suffix(_suffix(rig))
    report = session.explain_context()
    for found in (status, after, report):
        equal((found.stable_byte_hash, found.stable_token_hash), (of_text, of_ids), "hashes")


@law("REUSE-11", tier="session")
def check_one_manifest_digest(rig: Rig) -> None:
    """Every status of a session has the same manifest digest, whatever its texts."""
    session = rig.session()
    found = {session.ensure_prefix(rig.passage(6)).manifest_digest}
    found.add(session.prefill_suffix(_suffix(rig)).manifest_digest)
    found.add(session.ensure_prefix(rig.passage(9)).manifest_digest)
    found.add(session.explain_context().manifest_digest)
    found.add(rig.session().explain_context().manifest_digest)
    equal(len(found), 1, f"different digests among {found}")


@law("REUSE-12", tier="session")
def check_another_identity_starts_cold(rig: Rig) -> None:
    """A prefix of another identity starts cold and says why; on request it raises."""
    session, text = rig.session(), rig.passage(10)
    first = session.ensure_prefix(text)
    own = session.explain_context().manifest
    same = session.ensure_prefix(PrefixInput(text=text, manifest=own))
    equal((same.reused_tokens, same.reset_reason), (first.prefix_tokens, None), "its own identity")
    foreign = attrs.evolve(own, model_digest="0" * 64)
    cold = session.ensure_prefix(PrefixInput(text=text, manifest=foreign))
    equal((cold.reused_tokens, cold.prefilled_tokens), (0, first.prefix_tokens), "another identity")
    that("model_digest" in (cold.reset_reason or ""), f"the reason {cold.reset_reason!r}")
    strict = PrefixInput(text=text, manifest=foreign, on_mismatch="error")
    error = raises(ManifestMismatchError, lambda: session.ensure_prefix(strict), "on request")
    equal(error.field, "model_digest", "the error's field")


@law("REUSE-13", tier="session")
def check_a_suffix_of_another_identity(rig: Rig) -> None:
    """A suffix of another identity raises ManifestMismatchError and changes nothing."""
    session, text = rig.session(), rig.passage(10)
    session.ensure_prefix(text)
    before = session.explain_context()
    foreign = attrs.evolve(before.manifest, runtime_digest="0" * 64)
    suffix = SuffixInput(text=" more", manifest=foreign)
    raises(ManifestMismatchError, lambda: session.prefill_suffix(suffix), "a foreign suffix")
    equal(session.explain_context(), before, "the report afterwards")


@law("REUSE-14", tier="session")
def check_append_continues(rig: Rig) -> None:
    """mode="append" adds after what was generated, which stays as it is."""
    session, text, more = rig.session(), rig.passage(10), " and then"
    session.ensure_prefix(text)
    made = greedy(session, 5)
    status = session.prefill_suffix(SuffixInput(text=more, mode="append"))
    tail = rig.tokenizer.encode(more, add_special=False)
    _add_up(status, len(tail), "the appended text")
    expected = _ids(rig, text) + made + tail
    equal(status.resident_tokens, len(expected), "resident tokens")
    rig.follows(expected, greedy(session, 5), "after an appended text")


@law("REUSE-15", tier="session")
def check_an_empty_prefix(rig: Rig) -> None:
    """An empty prefix is a valid prefix, and a suffix may follow it."""
    session, suffix = rig.session(), rig.passage(8)
    status = session.ensure_prefix("")
    equal(status.prefix_tokens, len(_ids(rig, "")), "tokens of an empty prefix")
    session.prefill_suffix(suffix)
    rig.follows(_ids(rig, suffix), greedy(session, 5), "after an empty prefix")


@law("REUSE-16", tier="session")
def check_usage_counts_what_was_cached(rig: Rig) -> None:
    """Usage reports the prompt tokens, and how many had been evaluated before."""
    session, text = rig.session(), rig.passage(15)
    n = session.ensure_prefix(text).prefix_tokens
    cold = list(session.decode(max_tokens=3, temperature=0, ignore_eos=True))[-1].usage
    equal((cold.prompt_tokens, cold.cached_tokens), (n, 0), "usage of a cold run")
    session.ensure_prefix(text)
    warm = list(session.decode(max_tokens=3, temperature=0, ignore_eos=True))[-1].usage
    equal(warm.prompt_tokens, n, "prompt tokens of a warm run")
    can_go_back = rig.context().capabilities.kv_remove == "any"
    that(not can_go_back or warm.cached_tokens >= n - 1, f"{warm.cached_tokens} of {n} cached")


@law("REUSE-17", tier="session", needs="chat_template")
def check_chat_keeps_its_history(rig: Rig) -> None:
    """A chat keeps its earlier turns resident, and reuses them in the next one."""
    session = rig.session(n_ctx=2 * rig.n_ctx)
    messages = [{"role": "user", "content": "Who is Mira?"}]
    answer = joined(list(session.chat(messages, max_tokens=5, temperature=0)))
    before = session.explain_context()
    that(before.resident_tokens > 0, "nothing is resident after a chat")
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"}]
    usage = list(session.chat(messages, max_tokens=3, temperature=0))[-1].usage
    that(usage.cached_tokens > 0, "no token of the history was reused")


@law("REUSE-18", tier="session")
def check_what_is_no_prefix(rig: Rig) -> None:
    """A prefix or suffix that is not text raises InvalidInputError and changes nothing."""
    session = rig.session()
    session.ensure_prefix(rig.passage(5))
    before = session.explain_context()
    for bad in (5, None, b"bytes", "\ud800"):
        raises(InvalidInputError, lambda b=bad: session.ensure_prefix(b), f"prefix {bad!r}")
        raises(InvalidInputError, lambda b=bad: session.prefill_suffix(b), f"suffix {bad!r}")
    equal(session.explain_context(), before, "the report afterwards")


@law("REUSE-19", tier="session")
def check_long_greedy_run_is_as_cold(rig: Rig) -> None:
    """64 tokens decoded greedily from a warm context are those of a cold run."""
    session, text, suffix = rig.session(), rig.passage(20), _suffix(rig)
    session.ensure_prefix(rig.passage(30))
    session.ensure_prefix(text)
    session.prefill_suffix(_suffix(rig, 12))
    greedy(session, 5)
    session.prefill_suffix(suffix)
    rig.follows(_ids(rig, text, suffix), greedy(session, 64), "64 tokens of a warm run")


_OWN_SECONDS = 5e-4
"""What a session takes for itself, beside what its engine does."""


@law("REUSE-20", tier="session", needs="kv_remove", since="1.2")
def check_reuse_saves_time(rig: Rig) -> None:
    """A prefix resident except for one token takes far less processor time than a cold one."""
    tokens = rig.tokens(rig.n_ctx - 16)
    other = [*tokens[:-1], next(token for token in tokens if token != tokens[-1])]
    cold: list[float] = []
    warm: list[float] = []
    for _ in range(3):
        session = rig.session(n_batch=16, n_ubatch=16)
        for times, held in ((cold, tokens), (warm, other)):
            started = time.process_time()
            session.ensure_prefix(held)
            times.append(time.process_time() - started)
        rig.tidy()
    that(
        min(warm) < min(cold) / 3 + _OWN_SECONDS,
        f"a warm prefix took {1e3 * min(warm):.2f} ms, a cold one {1e3 * min(cold):.2f} ms",
    )
