"""What the public client of the protocol gets, over each engine."""

from __future__ import annotations

import asyncio
import base64
import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import attrs
import numpy as np
import pytest

import infercore as ic
from infercore.serve import ServeConfig, chat, completions, wire
from infercore.serve.answering import sampling_fields
from infercore.values.session import TokenLogprob

openai = pytest.importorskip("openai", reason="the client that the tests use is not installed")

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from served import Served

ASK = {"role": "user", "content": "Tell me of Mira."}
PLAIN = {"model": "tale", "messages": [ASK], "temperature": 0, "max_tokens": 12}


def test_a_chat_is_that_of_a_session(client: Any, pool: Any) -> None:
    with pool.open_session(namespace="apart") as session:
        text = "".join(c.text for c in session.chat([ASK], temperature=0, max_tokens=12))
    answer = client.chat.completions.create(**PLAIN)
    assert answer.choices[0].message.content == text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    for n_tokens in (3, 20):  # beside max_tokens, which is 12
        usage = client.chat.completions.create(**PLAIN, max_completion_tokens=n_tokens).usage
        assert usage.completion_tokens == min(n_tokens, 12)


def test_a_stream_joins_to_the_whole(client: Any) -> None:
    whole = client.chat.completions.create(**PLAIN).choices[0].message.content
    chunks = list(
        client.chat.completions.create(**PLAIN, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_next_turn_evaluates_that_turn_alone(client: Any) -> None:
    first = client.chat.completions.create(**PLAIN)
    messages = [
        ASK,
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And then?"},
    ]
    second = client.chat.completions.create(**{**PLAIN, "messages": messages})
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= first.usage.prompt_tokens
    assert second.usage.prompt_tokens - cached < 30


def test_seeds_and_several_answers(client: Any) -> None:
    asked = {**PLAIN, "temperature": 1.2, "n": 3, "seed": 7}
    texts = [[c.message.content for c in client.chat.completions.create(**asked).choices]]
    texts.append([c.message.content for c in client.chat.completions.create(**asked).choices])
    assert texts[0] == texts[1]
    alone = client.chat.completions.create(**{**asked, "n": 1, "seed": 8}).choices[0]
    assert alone.message.content == texts[0][1]
    for same in (7 + 2**32 - 1, 7 - (2**32 - 1)):  # the protocol's have 64 bits and a sign
        folded = client.chat.completions.create(**{**asked, "n": 1, "seed": same}).choices[0]
        assert folded.message.content == texts[0][0]


def test_what_several_answers_share_was_not_held_before(client: Any) -> None:
    asked = {
        **PLAIN,
        "messages": [{"role": "user", "content": "Who lives by the old well?"}],
        "n": 3,
    }
    cold, warm = (client.chat.completions.create(**asked).usage for _ in range(2))
    assert cold.prompt_tokens_details.cached_tokens < cold.prompt_tokens / 2
    assert warm.prompt_tokens_details.cached_tokens == warm.prompt_tokens - 1


def test_several_answers_stream_side_by_side(client: Any) -> None:
    asked = {**PLAIN, "n": 2, "stream": True}
    texts = ["", ""]
    for chunk in client.chat.completions.create(**asked):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts[0] == texts[1] != ""


def test_answers_begin_in_their_order(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The public client puts an answer where its first piece comes, whatever its index says."""
    answers = chat.answers

    async def last_first(*arguments: Any) -> AsyncIterator[Any]:
        items = [item async for item in answers(*arguments)]
        for item in sorted(items, key=lambda item: -item[0]):
            yield item

    monkeypatch.setattr(chat, "answers", last_first)
    asked = {**PLAIN, "n": 3, "temperature": 1.5, "seed": 1, "extra_body": {"regex": "[a-z]{4}"}}
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion()
    whole = client.chat.completions.create(**asked)
    assert [c.message.content for c in final.choices] == [c.message.content for c in whole.choices]


def test_logprobs(client: Any) -> None:
    answer = client.chat.completions.create(**PLAIN, logprobs=True, top_logprobs=3)
    rows = answer.choices[0].logprobs.content
    assert len(rows) == 12
    assert b"".join(bytes(row.bytes) for row in rows).decode() == answer.choices[0].message.content
    assert all(len(row.top_logprobs) == 3 for row in rows)
    assert all(row.logprob == max(t.logprob for t in row.top_logprobs) for row in rows)


def test_stop_strings_and_biases(client: Any, pool: Any) -> None:
    whole = client.chat.completions.create(**PLAIN).choices[0].message.content
    word = whole.split()[2]
    answer = client.chat.completions.create(**PLAIN, stop=word).choices[0]
    assert answer.message.content == whole.split(word)[0]
    assert answer.finish_reason == "stop"
    token = pool.tokenizer.encode(whole, add_special=False)[0]
    other = client.chat.completions.create(**PLAIN, logit_bias={str(token): -100})
    assert not other.choices[0].message.content.startswith(whole[:4])


OWN_FIELDS: list[dict[str, Any]] = [
    {"repeat_penalty": 3.0, "penalty_last_n": -1},
    {"dry_multiplier": 50.0, "dry_base": 3.0, "dry_allowed_length": 0},
    {"no_repeat_ngram_size": 1},
    {"stop": ["e"], "include_stop": True},
]


@pytest.mark.parametrize("fields", OWN_FIELDS, ids=lambda fields: next(iter(fields)))
def test_fields_of_sampling_mean_over_http_what_they_mean_in_a_session(
    client: Any, pool: Any, fields: dict[str, Any]
) -> None:
    flat = {"temperature": 0, "max_tokens": 24}
    with pool.open_session(namespace="apart") as session:
        without, wanted = (
            "".join(c.text for c in session.chat([ASK], **flat, **given)) for given in ({}, fields)
        )
    assert wanted != without
    ask = {"model": "tale", "messages": [ASK], **flat}
    answer = client.chat.completions.create(**ask, extra_body=fields)
    assert answer.choices[0].message.content == wanted
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ask, extra_body={**fields, "mirostat": 7})
    assert caught.value.param == "mirostat"


def test_every_field_of_sampling_reaches_the_decode() -> None:
    left = {"dry_sequence_breakers", "implementation", "logit_bias", "seed"}
    names = {field.name for field in attrs.fields(ic.SamplingConfig)} - left
    request = wire.CompletionRequest(model="tale", prompt="", **dict.fromkeys(names, 1))
    found = sampling_fields(request, ServeConfig(), None)
    assert {name: found.get(name) for name in names} == dict.fromkeys(names, 1)


def test_text_in_the_form_of_a_schema(client: Any) -> None:
    from pydantic import BaseModel

    class Baker(BaseModel):
        age: int
        awake: bool

    answer = client.chat.completions.parse(**{**PLAIN, "max_tokens": 60}, response_format=Baker)
    assert isinstance(answer.choices[0].message.parsed, Baker)
    plain = client.chat.completions.create(
        **{**PLAIN, "max_tokens": 200}, extra_body={"regex": "(yes|no)"}
    )
    assert plain.choices[0].message.content in ("yes", "no")


def test_an_answer_of_at_least_so_many_tokens(client: Any) -> None:
    fields = {**PLAIN, "max_tokens": 300}
    short = client.chat.completions.create(**fields)
    assert short.choices[0].finish_reason == "stop"
    n_tokens = short.usage.completion_tokens + 5
    longer = client.chat.completions.create(**fields, extra_body={"min_tokens": n_tokens})
    assert longer.usage.completion_tokens >= n_tokens


def test_completions(client: Any, pool: Any) -> None:
    with pool.open_session(namespace="apart") as session:
        session.ensure_prefix("Once upon a time")
        text = "".join(c.text for c in session.decode(temperature=0, max_tokens=8))
    fields = {"model": "tale", "temperature": 0, "max_tokens": 8}
    answer = client.completions.create(prompt="Once upon a time", **fields, echo=True)
    assert answer.choices[0].text == "Once upon a time" + text
    answer = client.completions.create(prompt="Once upon a time", **fields, logprobs=2)
    assert "".join(answer.choices[0].logprobs.tokens) == text
    assert answer.choices[0].logprobs.text_offset[:2] == [
        0,
        len(answer.choices[0].logprobs.tokens[0]),
    ]
    both = client.completions.create(prompt=["Once upon a time", "There was"], **fields)
    assert both.choices[0].text == text
    assert [choice.index for choice in both.choices] == [0, 1]
    tokens = pool.tokenizer.encode("Once upon a time")
    assert client.completions.create(prompt=tokens, **fields).choices[0].text == text
    pieces = client.completions.create(prompt="Once upon a time", **fields, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == text


IN_PIECES = {
    "model": "tale",
    "prompt": "Once",
    "temperature": 0,
    "max_tokens": 60,
    "extra_body": {"regex": "é⚓😀x⚓ day"},
}
"""A text with characters of which no token is a whole one."""


def test_probabilities_of_characters_in_several_tokens(client: Any) -> None:
    choice = client.completions.create(**IN_PIECES, logprobs=5).choices[0]
    rows = choice.logprobs
    is_part = [token.startswith("bytes:\\x") for token in rows.tokens]
    assert any(is_part)
    read = [
        token.removeprefix("bytes:").encode().decode("unicode_escape").encode("latin-1")
        if of_several
        else token.encode()
        for token, of_several in zip(rows.tokens, is_part, strict=True)
    ]
    assert b"".join(read).decode() == choice.text
    before = [b"".join(read[:place]).decode(errors="ignore") for place in range(len(read))]
    assert rows.text_offset == [len(text) for text in before]
    for token, logprob, top in zip(
        rows.tokens, rows.token_logprobs, rows.top_logprobs, strict=True
    ):
        assert top[token] == logprob
        assert len(top) in (5, 6), "no two of them share a name"
    pieces = client.completions.create(**IN_PIECES, logprobs=5, stream=True)
    offsets = [piece.choices[0].logprobs.text_offset for piece in pieces if piece.choices[0].text]
    assert [offset for of_piece in offsets for offset in of_piece] == rows.text_offset


def test_the_chosen_token_is_among_the_likeliest(client: Any) -> None:
    fields = {"model": "tale", "prompt": "Once", "max_tokens": 24, "temperature": 2, "seed": 3}
    for n_top in (0, 2):
        rows = client.completions.create(**fields, logprobs=n_top).choices[0].logprobs
        tops = zip(rows.tokens, rows.token_logprobs, rows.top_logprobs, strict=True)
        assert all(top[token] == logprob for token, logprob, top in tops)
        assert {len(top) for top in rows.top_logprobs} == ({1} if n_top == 0 else {2, 3})


def test_a_control_token_takes_no_room_in_the_text() -> None:
    served = Mock(token_bytes={1: b"ab", 2: b"<end>", 3: b"c"}, control={2})
    found = [TokenLogprob(token=token, logprob=-1.0) for token in (1, 2, 3)]
    rows = completions._Logprobs(served).rows(found)
    assert rows is not None
    assert rows["text_offset"] == [0, 2, 2]
    assert rows["tokens"] == ["ab", "<end>", "c"]


def test_the_usage_of_a_stream_is_null_until_its_last_event(client: Any) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    asked = {"model": "tale", "prompt": "Once upon a time", "max_tokens": 4, **options}
    for stream in (
        client.completions.create(**asked),
        client.chat.completions.create(**PLAIN, **options),
    ):
        *events, last = [event.model_dump(exclude_unset=True) for event in stream]
        assert {event["usage"] for event in events} == {None}
        assert last["choices"] == []
        assert last["usage"]["prompt_tokens"] > 0


def test_responses(client: Any) -> None:
    fields = {"model": "tale", "temperature": 0, "max_output_tokens": 12}
    text = client.chat.completions.create(**PLAIN).choices[0].message.content
    answer = client.responses.create(input=ASK["content"], **fields)
    assert answer.output_text == text
    assert answer.status == "incomplete"
    kinds, deltas = [], ""
    for event in client.responses.create(input=[ASK], **fields, stream=True):
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            deltas += event.delta
    assert deltas == text
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.incomplete"
    details = answer.usage.input_tokens_details
    assert details.cached_tokens + details.cache_write_tokens == answer.usage.input_tokens
    with client.responses.stream(model="tale", input=[ASK], temperature=0) as stream:
        final = stream.get_final_response()
    assert answer.output[-1].status == "incomplete", "as the item that was cut off"
    assert final.status == final.output[-1].status == "completed"
    assert final.output_text.startswith(text)


def test_embeddings(client: Any, pool: Any) -> None:
    texts = ["a baker", "a dog"]
    vectors = pool.embed(texts, pooling="mean")
    for form in ("float", "base64"):
        rows = client.embeddings.create(model="tale", input=texts, encoding_format=form).data
        found = [row.embedding for row in rows]
        if form == "base64":
            found = [np.frombuffer(base64.b64decode(text), "<f4") for text in found]
        assert np.asarray(found) == pytest.approx(vectors, abs=1e-5)


def test_token_ids_in_place_of_texts_are_refused_with_what_to_set(client: Any) -> None:
    for ids in ([5, 6], [[5, 6], [7]]):
        with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length") as caught:
            client.embeddings.create(model="tale", input=ids)
        assert caught.value.param == "input"


WRONG: dict[str, tuple[dict[str, Any], int, str | None]] = {
    "model": ({"model": "nobody"}, 404, "model"),
    "temperature": ({"temperature": -1}, 400, "temperature"),
    "type": ({"temperature": "hot"}, 400, "temperature"),
    "unknown": ({"extra_body": {"wings": 2}}, 400, "wings"),
    "store": ({"store": True}, 400, "store"),
    "n": ({"n": 0}, 400, "n"),
    "large n": ({"n": 10**9}, 400, "n"),
    "limit": ({"max_completion_tokens": -1}, 400, "max_completion_tokens"),
    "no content": ({"messages": [{"role": "user", "content": None}]}, 400, "messages.content"),
    "audio": ({"audio": {"voice": "x", "format": "mp3"}}, 400, "audio"),
    "no messages": ({"messages": []}, 400, "messages"),
    "role": ({"messages": [{"content": "x"}]}, 400, None),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        400,
        "messages",
    ),
    "long": ({"messages": [{**ASK, "content": "tick tock " * 900}]}, 400, "messages"),
    "schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
        400,
        "response_format",
    ),
    "effort": ({"reasoning_effort": "high"}, 400, "reasoning_effort"),
    "choice": ({"tool_choice": "required"}, 400, "tool_choice"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused_by_name(client: Any, name: str) -> None:
    fields, status, param = WRONG[name]
    for stream in (False, True):
        with pytest.raises(openai.APIStatusError) as caught:
            client.chat.completions.create(**{**PLAIN, **fields, "stream": stream})
        assert caught.value.status_code == status
        body = caught.value.body
        assert isinstance(body, dict)
        assert set(body) == {"message", "type", "param", "code"}
        if param is not None:
            assert body["param"] == param


def test_the_text_of_a_refusal_says_what_the_client_wrote(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=r"max_completion_tokens=-1 is not allowed"):
        client.chat.completions.create(model="tale", messages=[ASK], max_completion_tokens=-1)
    with pytest.raises(openai.BadRequestError, match=r"max_output_tokens=-1 is not allowed"):
        client.responses.create(model="tale", input=[ASK], max_output_tokens=-1)


def test_a_full_window_is_refused_with_what_a_client_can_do(client: Any) -> None:
    talk = [{**ASK, "content": "tick tock " * 60}, {"role": "assistant", "content": "Yes."}] * 4
    for route, name in ((client.chat.completions, "messages"), (client.responses, "input")):
        for extra, advice in (
            ({}, 'send truncation="auto", which leaves out the oldest turns'),
            ({"truncation": "auto"}, "shorten these"),
        ):
            last = {**ASK, "content": "tick tock " * 900} if extra else ASK
            with pytest.raises(openai.BadRequestError) as caught:
                route.create(model="tale", **{name: [*talk, last]}, extra_body=extra)
            assert advice in caught.value.message
            assert "larger n_ctx" in caught.value.message
            assert "open" not in caught.value.message
    with pytest.raises(openai.BadRequestError, match="or serve the model with a larger n_ctx"):
        client.completions.create(model="tale", prompt="tick tock " * 900)


def test_a_response_names_the_items_of_its_input_that_were_left_out(client: Any) -> None:
    long = {**ASK, "content": "tick tock " * 60}
    thought = {"type": "reasoning", "id": "r", "summary": []}
    talk = [long, thought, {"role": "assistant", "content": "Yes."}] * 4
    fields = {"model": "tale", "input": [*talk, ASK], "instructions": "Be brief."}
    fields |= {"truncation": "auto", "max_output_tokens": 4, "temperature": 0}
    answer = client.responses.create(**fields)
    left_out = answer.dropped_messages
    assert left_out == list(range(len(left_out)))
    assert len(left_out) in (3, 6, 9, 12), "whole turns, from the first item on"
    events = client.responses.create(**fields, stream=True)
    told = [e.response.dropped_messages for e in events if hasattr(e, "response")]
    assert told == [left_out] * 3, "from the first event on"


def test_values_that_mean_what_is_done_anyway(client: Any) -> None:
    fine = {
        "store": False, "parallel_tool_calls": True, "service_tier": "auto", "user": "me",
        "metadata": {}, "modalities": ["text"],
    }  # fmt: skip
    unused = dict.fromkeys(("audio", "functions", "function_call", "prediction"))
    assert client.chat.completions.create(**PLAIN, **fine, extra_body=unused).choices
    fine["parallel_tool_calls"] = False
    assert client.chat.completions.create(**PLAIN, **fine).choices
    for logprobs in (False, None):
        answer = client.chat.completions.create(**PLAIN, logprobs=logprobs, top_logprobs=0)
        assert answer.choices[0].logprobs is None
    text = {"model": "tale", "prompt": "Once", "max_tokens": 2}
    for n, best_of in ((None, 1), (1, 1), (2, 2)):
        assert client.completions.create(**text, n=n, best_of=best_of).choices
    for n, best_of in ((None, 2), (2, 3), (2, 1)):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(**text, n=n, best_of=best_of)
        assert caught.value.param == "best_of"
    unused = dict.fromkeys(("conversation", "max_tool_calls", "prompt", "top_logprobs"))
    fields = {"model": "tale", "input": [ASK], "max_output_tokens": 4}
    assert client.responses.create(**fields, text={"verbosity": "medium"}).output
    assert client.responses.create(**fields, extra_body=unused).output
    for name, value in (("prompt", {"id": "p"}), ("top_logprobs", 2)):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**fields, extra_body={name: value})
        assert caught.value.param == name


def test_errors_name_fields_of_the_request(client: Any) -> None:
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
    for item in (image, {"role": "wizard", "content": "x"}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="tale", input=[item])
        assert caught.value.param == "input"
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="tale", input="tick tock " * 900)
    assert caught.value.param == "input"
    with pytest.raises(openai.BadRequestError) as caught:
        client.post(
            "/rerank", cast_to=object, body={"model": "tale", "query": "x", "documents": ["y"]}
        )
    assert caught.value.param == "model"


def test_the_asynchronous_client_many_at_once(served: Served) -> None:
    whole = served.client().chat.completions.create(**PLAIN).choices[0].message.content

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key="none", max_retries=0
        ) as client:
            asked = [client.chat.completions.create(**PLAIN) for _ in range(10)]
            return [a.choices[0].message.content or "" for a in await asyncio.gather(*asked)]

    assert asyncio.run(all_of_them()) == [whole] * 10


def test_a_stream_of_the_asynchronous_client(served: Served) -> None:
    whole = served.client().chat.completions.create(**PLAIN).choices[0].message.content

    async def joined() -> str:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(**PLAIN, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(joined()) == whole


def test_many_threads(client: Any) -> None:
    def ask(number: int) -> str:
        fields = {**PLAIN, "temperature": 1, "seed": number}
        return str(client.chat.completions.create(**fields).choices[0].message.content)

    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(ask, range(8)))
    assert together == [ask(number) for number in range(8)]


def test_tokens_and_facts(served: Served, pool: Any) -> None:
    import httpx

    with httpx.Client(base_url=served.url) as http:
        asked = {"model": "tale", "prompt": "Once upon", "add_special": False}
        tokens = http.post("/tokenize", json=asked).json()["tokens"]
        assert tokens == pool.tokenizer.encode("Once upon", add_special=False)
        back = http.post("/detokenize", json={"model": "tale", "tokens": tokens}).json()
        assert back == {"prompt": "Once upon"}
        assert http.get("/health").json() == {"status": "ok"}
        assert [row["id"] for row in http.get("/v1/models").json()["data"]] == ["tale"]
        document = http.get("/openapi.json").json()
        assert "/v1/chat/completions" in document["paths"]
        page = http.get("/")
        assert page.status_code == 200
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert http.get("/nowhere").status_code == 404
        assert http.get("/v1/chat/completions").status_code == 405
        assert http.post("/tokenize", content=b"{").status_code == 400
        json.dumps(document)
