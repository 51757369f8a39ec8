"""Models: loaded when asked for, unloaded, short of memory, broken for good."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

import infercore as ic
from infercore.serve import create_app
from serve.asking import ASK, CHAT
from served import serving

httpx = pytest.importorskip("httpx", reason="the client that the tests use is not installed")

if TYPE_CHECKING:
    from pathlib import Path


def test_a_name_that_no_answer_can_hold_is_refused(pool: Any) -> None:
    with pytest.raises(ic.InvalidInputError, match="another name"):
        create_app({"tale-\udcff": pool})  # what a file of that name gives on the command line


def test_models_are_loaded_when_asked_for_and_unloaded_when_idle(pack_path: Path) -> None:
    from infercore.serve.app import App
    from infercore.serve.config import ServeConfig
    from infercore.serve.models import Models

    models = Models({"tale": lambda: ic.open_pool(pack_path, n_ctx=256, n_threads=1)}, n_warm=4)
    app = App(models, ServeConfig(), idle_timeout=0.2)

    async def story() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            row = (await http.get("/v1/models")).json()["data"][0]
            assert row["meta"]["loaded"] is False
            answer = await http.post(CHAT, json=ASK, timeout=60)
            assert answer.status_code == 200
            tale = models.get("tale")
            assert tale.pool is not None
            await tale.unload_when_idle(3600)
            assert tale.pool is not None
            await asyncio.sleep(0.3)
            await tale.unload_when_idle(0.2)
            assert tale.pool is None
            again = await http.post(CHAT, json=ASK, timeout=60)
            text = again.json()["choices"][0]["message"]["content"]
            assert text == answer.json()["choices"][0]["message"]["content"]
            await tale.close()

    asyncio.run(story())


def test_a_request_while_an_idle_model_is_unloaded(
    pack_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from infercore.serve.models import Models, Warm

    models = Models({"tale": lambda: ic.open_pool(pack_path, n_ctx=256, n_threads=1)}, n_warm=4)
    tale = models.get("tale")

    async def story() -> None:
        closing, go = asyncio.Event(), asyncio.Event()

        async def close(_: Warm) -> None:
            closing.set()
            await go.wait()

        async with tale.used():
            pass
        with monkeypatch.context() as patched:
            patched.setattr(Warm, "close", close)
            unloading = asyncio.create_task(tale.unload_when_idle(0))
            await closing.wait()
            asyncio.get_running_loop().call_later(0.1, go.set)
            async with tale.used() as pool:
                await unloading
                assert not pool.closed
        await tale.close()

    asyncio.run(story())


def slow_to_load(path: Path, seconds: float) -> Any:
    def opens() -> Any:
        time.sleep(seconds)
        return ic.open_pool(path, n_ctx=256, n_threads=1)

    return opens


def test_loading_takes_its_part_of_a_requests_time(pack_path: Path) -> None:
    from infercore.serve.app import App
    from infercore.serve.config import ServeConfig
    from infercore.serve.models import Models

    models = Models({"tale": slow_to_load(pack_path, 0.5)}, n_warm=0)
    app = App(models, ServeConfig(request_timeout=0.1))
    asks = [(CHAT, ASK), ("/v1/embeddings", {"model": "tale", "input": "a"})]
    asks += [("/tokenize", {"model": "tale", "prompt": "a"})]

    async def story() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            answers = await asyncio.gather(*(http.post(path, json=body) for path, body in asks))
            assert [answer.status_code for answer in answers] == [408, 408, 408]
            for answer in answers:
                assert answer.json()["error"]["code"] == "timeout"
        await models.get("tale").close()

    asyncio.run(story())


def test_a_model_makes_room_where_memory_is_short(pack_path: Path) -> None:
    from infercore.serve.app import App
    from infercore.serve.config import ServeConfig
    from infercore.serve.models import Models

    def opens_alone(other: str) -> Any:
        def opens() -> Any:
            if models.get(other).pool is not None:
                raise ic.OutOfMemoryError("no room")
            return ic.open_pool(pack_path, n_ctx=256, n_threads=1)

        return opens

    models = Models({"one": opens_alone("two"), "two": opens_alone("one")}, n_warm=4)

    async def story() -> None:
        transport = httpx.ASGITransport(App(models, ServeConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            for name, other in (("one", "two"), ("two", "one")):
                answer = await http.post(CHAT, json={**ASK, "model": name}, timeout=60)
                assert answer.status_code == 200
                assert models.get(other).pool is None
            async with models.get("two").used():
                answer = await http.post(CHAT, json={**ASK, "model": "one"}, timeout=60)
                assert answer.status_code == 503, "what is in use stays"
        for name in ("one", "two"):
            await models.get(name).close()

    asyncio.run(story())


def break_for_good(pool: Any) -> None:
    error = ic.SessionFatalError("the engine has died", cause=RuntimeError("gone"))
    pool.owner.ask(lambda: pool.owner.scheduler.endings.fail(error))


def test_a_pool_that_failed_for_good_is_opened_anew(pack_path: Path) -> None:
    from infercore.serve.app import App
    from infercore.serve.config import ServeConfig
    from infercore.serve.models import Models

    models = Models({"tale": slow_to_load(pack_path, 0)}, n_warm=4)

    async def story() -> None:
        transport = httpx.ASGITransport(App(models, ServeConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            first = await http.post(CHAT, json=ASK, timeout=60)
            broken = models.get("tale").pool
            await asyncio.to_thread(break_for_good, broken)
            assert (await http.get("/health")).status_code == 200, "the next request opens it"
            again = await http.post(CHAT, json=ASK, timeout=60)
            assert models.get("tale").pool is not broken
            texts = [a.json()["choices"][0]["message"]["content"] for a in (first, again)]
            assert texts[0] == texts[1]
        await models.get("tale").close()

    asyncio.run(story())


def test_a_pool_of_the_callers_that_failed_is_told_by_health(model: Any) -> None:
    with model.new_pool(n_ctx=256, n_threads=1) as pool, serving({"tale": pool}) as served:
        assert httpx.get(f"{served.url}/health").status_code == 200
        break_for_good(pool)
        health = httpx.get(f"{served.url}/health")
        assert (health.status_code, health.json()["models"]) == (503, ["tale"])
        assert httpx.post(f"{served.url}{CHAT}", json=ASK).status_code == 503
