"""Conversations in a pool: what it holds of them is reused, not evaluated again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import infercore as ic

ROOM = {"n_ctx": 512, "n_parallel": 4}


def system(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": text}]


def say(session: Any, history: list[dict[str, str]], text: str) -> tuple[ic.Usage, int]:
    """Add a turn and its answer; return the usage, and how many tokens were asked for."""
    history.append({"role": "user", "content": text})
    chunks = list(session.chat(history, max_tokens=8, temperature=0))
    history.append({"role": "assistant", "content": "".join(chunk.text for chunk in chunks)})
    usage = chunks[-1].usage
    return usage, usage.prompt_tokens


def test_two_conversations_in_turn_stay_warm(reference: Any) -> None:
    with reference.new_pool(**ROOM) as pool:
        chats = [
            (pool.open_session(), system("You are a storyteller.")),
            (pool.open_session(), system("We are bakers of small cakes.")),
        ]
        held = [0, 0]
        for number in range(3):
            for i, (session, history) in enumerate(chats):
                usage, n = say(session, history, f"Where does Nadia live, {number}?")
                # the answer that was cut short may be tokenized otherwise, what came before it not
                assert usage.cached_tokens >= held[i] - 2
                held[i] = n


def test_what_was_generated_is_not_evaluated_again(reference: Any) -> None:
    prompt = reference.tokenizer.encode("Once upon a time")
    with reference.new_pool(**ROOM) as pool, pool.open_session() as session:
        session.ensure_prefix(prompt)
        chunks = list(session.decode(max_tokens=8, temperature=0))
        made = [token for chunk in chunks for token in chunk.tokens]
        # nothing looks at the session in between; the token that was chosen last is not held yet
        assert session.ensure_prefix([*prompt, *made, 5]).prefilled_tokens == 2


def test_an_edited_turn_reuses_all_before_it(reference: Any) -> None:
    with reference.new_pool(**ROOM) as pool, pool.open_session() as session:
        history = system("You are a storyteller.")
        _, n_first = say(session, history, "Where does Nadia live?")
        for number in range(3):
            say(session, history, f"And then, {number}?")
        edited = history[:3]
        usage, _ = say(session, edited, "Whose sign is the sheep?")
        assert n_first - 2 <= usage.cached_tokens < usage.prompt_tokens


def test_another_session_goes_back_to_what_one_holds(reference: Any) -> None:
    with reference.new_pool(**ROOM) as pool, pool.open_session() as session:
        history = system("You are a storyteller.")
        _, n_first = say(session, history, "Where does Nadia live?")
        say(session, history, "And then?")
        with pool.open_session() as other:  # the same conversation, from its first turn on
            usage, _ = say(other, history[:3], "Whose sign is the sheep?")
            assert usage.cached_tokens >= n_first - 2
        usage, _ = say(session, history, "And what else?")
        assert usage.prompt_tokens - usage.cached_tokens < n_first


@pytest.mark.parametrize("cache_bytes", [0, 2**26])
def test_a_session_for_each_request_needs_a_cache(reference: Any, cache_bytes: int) -> None:
    if not reference.capabilities.sequence_state:
        pytest.skip("this model's sequences cannot be saved")
    with reference.new_pool(**ROOM, cache_bytes=cache_bytes) as pool:
        chats = [system("You are a storyteller."), system("We are bakers of small cakes.")]
        held, cached = [0, 0], []
        for number in range(3):
            for i, history in enumerate(chats):
                with pool.open_session() as session:
                    usage, n = say(session, history, f"Where does Nadia live, {number}?")
                if number:
                    cached.append(usage.cached_tokens - held[i])
                held[i] = n
        assert all(n >= -2 for n in cached) if cache_bytes else not any(n >= -2 for n in cached)


@pytest.mark.parametrize("cache_bytes", [0, 2**26])
def test_one_session_that_alternates_finds_both_in_the_cache(
    reference: Any, cache_bytes: int
) -> None:
    with (
        reference.new_pool(**ROOM, cache_bytes=cache_bytes) as pool,
        pool.open_session() as session,
    ):
        chats = [system("You are a storyteller."), system("We are bakers of small cakes.")]
        held, cached = [0, 0], []
        for number in range(3):
            for i, history in enumerate(chats):
                usage, n = say(session, history, f"Where does Nadia live, {number}?")
                if number:
                    cached.append(usage.cached_tokens - held[i])
                held[i] = n
        assert all(n >= -2 for n in cached) if cache_bytes else not any(n >= -2 for n in cached)
