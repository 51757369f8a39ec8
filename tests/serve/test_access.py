"""Who may ask: keys, names of hosts, pages of other origins."""

from __future__ import annotations

from typing import Any

import pytest

import infercore as ic
from serve.asking import ASK, CHAT
from served import serving

httpx = pytest.importorskip("httpx", reason="the client that the tests use is not installed")
openai = pytest.importorskip("openai", reason="the client that the tests use is not installed")


def test_keys(pool: Any) -> None:
    with serving({"tale": pool}, api_keys=["first", "second"]) as served:
        for headers in ({}, {"Authorization": "Bearer third"}, {"Authorization": "first"}):
            answer = httpx.post(f"{served.url}{CHAT}", json=ASK, headers=headers)
            assert answer.status_code == 401
        assert httpx.get(f"{served.url}/metrics").status_code == 401
        assert httpx.get(f"{served.url}/health").status_code == 200
        cached = []
        for key in ("first", "first", "second", "second"):
            usage = served.client(api_key=key).chat.completions.create(**ASK).usage
            cached.append(usage.prompt_tokens_details.cached_tokens > 0)
        assert cached == [False, True, False, True], "keys share no prefixes"


def test_the_document_says_of_each_route_whether_it_asks_for_a_key(pool: Any) -> None:
    with serving({"tale": pool}, api_keys=["first"]) as served:
        key = {"Authorization": "Bearer first"}
        document = httpx.get(f"{served.url}/openapi.json", headers=key).json()
        asked = {
            (method, path): ("security" in told, "401" in told["responses"])
            for path, methods in document["paths"].items()
            for method, told in methods.items()
        }
        for (method, path), told in asked.items():
            url = f"{served.url}{path}".replace("{name}", "tale")
            is_refused = httpx.request(method, url).status_code == 401
            assert told == (is_refused, is_refused), path
            if method == "get":
                assert httpx.get(url, headers=key).status_code == 200
    posts = {f"/v1/{name}" for name in ("chat/completions", "completions", "embeddings", "rerank")}
    posts |= {"/v1/responses", "/tokenize", "/detokenize"}
    gets = {"/v1/models", "/v1/models/{name}", "/health", "/metrics", "/openapi.json", "/"}
    assert set(asked) == {("post", path) for path in posts} | {("get", path) for path in gets}


def test_names_that_somebody_points_here(pool: Any) -> None:
    with serving({"tale": pool}, allowed_hosts=["Proxy.example"]) as served:
        port = served.url.rsplit(":", 1)[1]
        for host, status in (
            (f"localhost:{port}", 200),
            ("[::1]", 200),
            ("proxy.example", 200),
            (f"evil.example:{port}", 403),
            ("127.0.0.1.evil.example", 403),
            ("", 403),
        ):
            answer = httpx.get(f"{served.url}/v1/models", headers={"Host": host})
            assert answer.status_code == status, host
    with serving({"tale": pool}, api_keys=["k"]) as served:
        headers = {"Host": "evil.example", "Authorization": "Bearer k"}
        assert httpx.get(f"{served.url}/v1/models", headers=headers).status_code == 200


def test_pages_of_other_origins(pool: Any) -> None:
    with serving({"tale": pool}, cors_origins=["http://mine"]) as served:
        for origin, allowed in (("http://mine", "http://mine"), ("http://other", None)):
            answer = httpx.get(f"{served.url}/v1/models", headers={"Origin": origin})
            assert answer.headers.get("access-control-allow-origin") == allowed
            exposed = answer.headers.get("access-control-expose-headers")
            assert exposed == (allowed and "Retry-After")
        headers = {
            "Origin": "http://mine",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "x-stainless-lang,content-type",
        }
        answer = httpx.options(f"{served.url}{CHAT}", headers=headers)
        assert answer.status_code == 204
        asked = headers["Access-Control-Request-Headers"]
        assert answer.headers["access-control-allow-headers"] == asked


@pytest.mark.parametrize("keys", ["secret", b"secret", ["secret", 7], ["secret", " "]])
def test_no_error_shows_a_key(keys: Any) -> None:
    from infercore.serve.config import ServeConfig

    with pytest.raises(ic.InvalidInputError) as caught:
        ServeConfig(api_keys=keys)
    assert "secret" not in f"{caught.value} {caught.value!r} {vars(caught.value)}"
