"""Engines of a server in processes of their own: what dies, hangs, or cannot be isolated."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import infercore as ic
from infercore.serve.app import App
from infercore.serve.config import ServeConfig
from infercore.serve.models import Models, Opening
from served import Served, serving

httpx = pytest.importorskip("httpx", reason="the client that the tests use is not installed")

CHAT = "/v1/chat/completions"
ASK = {
    "model": "tale",
    "messages": [{"role": "user", "content": "Tell me of Mira."}],
    "temperature": 0,
    "max_tokens": 40,
}
FIELDS = {"n_ctx": 512, "n_parallel": 2, "n_threads": 1}


def text_of(served: Served, *, killing: int | None = None) -> str:
    """Return an answer read piece by piece; in its middle a process is killed."""
    pieces = []
    with served.client(timeout=60).chat.completions.create(**ASK, stream=True) as stream:
        for chunk in stream:
            pieces.append(chunk.choices[0].delta.content or "")
            if killing is not None and len(pieces) == 8:
                os.kill(killing, signal.SIGKILL)
    return "".join(pieces)


def test_an_engine_that_dies_in_mid_stream(served: Served, pool: Any) -> None:
    whole = text_of(served)
    assert text_of(served, killing=pool.process.pid) == whole
    assert pool.stats().n_restarts == 1
    assert httpx.get(f"{served.url}/health").status_code == 200
    assert served.client().models.retrieve("tale").meta["isolated"] is True


def test_files_that_have_changed_are_told_of_without_their_path(
    pack_path: Path, backend_name: str, tmp_path: Path
) -> None:
    path = tmp_path / pack_path.name
    (shutil.copytree if pack_path.is_dir() else shutil.copyfile)(pack_path, path)
    weights = max((path, *path.rglob("*")), key=lambda each: each.stat().st_size)
    other = bytearray(weights.read_bytes())
    other[-4:] = bytes(4)
    (tmp_path / "new").write_bytes(other)
    fields = {**FIELDS, "backend": backend_name, "isolate": True}
    with ic.open_pool(path, **fields) as pool, serving({"tale": pool}) as served:
        assert httpx.post(f"{served.url}{CHAT}", json=ASK, timeout=60).status_code == 200
        (tmp_path / "new").replace(weights)
        os.kill(pool.process.pid, signal.SIGKILL)
        answer = httpx.post(f"{served.url}{CHAT}", json=ASK, timeout=60)
    assert answer.status_code >= 500
    assert "have changed" in answer.json()["error"]["message"]
    assert str(tmp_path) not in answer.text


def test_an_engine_that_stands_still_holds_up_no_other(served: Served, pool: Any) -> None:
    pid = pool.process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        asking = threading.Thread(target=text_of, args=(served,))
        asking.start()
        metrics = threading.Thread(target=httpx.get, args=(f"{served.url}/metrics",))
        metrics.start()
        time.sleep(0.2)
        assert httpx.get(f"{served.url}/health", timeout=10).status_code == 200
        assert httpx.get(f"{served.url}/v1/models", timeout=10).status_code == 200
    finally:
        os.kill(pid, signal.SIGCONT)
    asking.join(60)
    metrics.join(60)
    assert not asking.is_alive()


def row_of(opening: Opening) -> tuple[dict[str, Any], int]:
    """Return what /v1/models tells of a model, and the status of a chat with it."""
    models = Models({"tale": opening}, n_warm=1)

    async def story() -> tuple[dict[str, Any], int]:
        transport = httpx.ASGITransport(App(models, ServeConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            answer = await http.post(CHAT, json=ASK, timeout=60)
            row = (await http.get("/v1/models")).json()["data"][0]["meta"]
        await models.get("tale").close()
        return row, answer.status_code

    return asyncio.run(story())


def test_what_cannot_be_isolated_is_opened_here_and_says_so(
    pack_path: Path, backend_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {**FIELDS, "backend": backend_name, "progress": lambda _: True}
    row, status = row_of(Opening(str(pack_path), fields, isolate=True))
    assert status == 200
    assert row["isolated"] is False
    assert "progress" in row["in_process"]
    assert "progress" in caplog.text


def test_what_is_not_to_be_isolated(pack_path: Path, backend_name: str) -> None:
    fields = {**FIELDS, "backend": backend_name}
    row, status = row_of(Opening(str(pack_path), fields, isolate=False))
    assert status == 200
    assert (row["isolated"], row["in_process"]) == (False, "the operator asked for it")


def test_vectors_of_a_process_of_its_own(backend_name: str) -> None:
    import infercore_models
    import pack

    encoder_path = infercore_models.path("encoder", pack.FORMATS[backend_name])
    with (
        ic.open_pool(encoder_path, isolate=True, n_threads=1) as pool,
        serving({"words": pool}) as served,
    ):
        answer = served.client().embeddings.create(model="words", input=["a baker", "a dog"])
        assert answer.usage.prompt_tokens > 2
        found = [row.embedding for row in answer.data]
    with ic.open_pool(encoder_path, n_threads=1) as pool:
        for vector, expected in zip(found, pool.embed(["a baker", "a dog"]), strict=True):
            assert vector == pytest.approx(expected.tolist(), abs=1e-5)


def test_ranks_of_a_process_of_its_own(
    backend_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import infercore_models

    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "tools"))
    from rows import ranker

    path = ranker.write(infercore_models.path("encoder", "gguf-f32"), tmp_path / "ranker.gguf")
    if backend_name == "openvino":
        source = infercore_models.path("encoder", "openvino")
        path = ranker.write_ir(source, path, tmp_path / "ranker")
    texts = ["an owl", "a baker and a fox went home", "the stone bridge"]
    body = {"model": "best", "query": "a baker", "documents": texts}
    fields = {"backend": backend_name, "n_threads": 1}
    with ic.open_pool(path, isolate=True, **fields) as pool, serving({"best": pool}) as served:
        whole = httpx.post(f"{served.url}/v1/rerank", json=body)
        assert whole.status_code == 200, whole.text
        two = {**body, "top_n": 2, "return_documents": True}
        first = httpx.post(f"{served.url}/v1/rerank", json=two).json()["results"]
        chat = {"model": "best", "messages": [{"role": "user", "content": "a"}]}
        refused = httpx.post(f"{served.url}/v1/chat/completions", json=chat)
        metrics = httpx.get(f"{served.url}/metrics").text
    counted = 2.0 * whole.json()["usage"]["prompt_tokens"]
    assert f'infercore_prompt_tokens_total{{model="best"}} {counted}' in metrics
    with ic.open_pool(path, **fields) as pool:
        expected = pool.rerank("a baker", texts)
    rows = [(row["index"], row["relevance_score"]) for row in whole.json()["results"]]
    assert [place for place, _ in rows] == [place for place, _ in expected]
    assert [score for _, score in rows] == pytest.approx([score for _, score in expected], abs=1e-4)
    assert [(row["index"], row["document"]["text"]) for row in first] == [
        (place, texts[place]) for place, _ in expected[:2]
    ]
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported")


def test_a_session_that_failed_is_not_kept_for_the_next_turn(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    from infercore.session.asynchronous import AsyncDecodeStream

    async def failing(_: AsyncDecodeStream) -> Any:
        raise ic.SessionFatalError("the engine died over it twice", cause=RuntimeError("gone"))

    async def kept() -> int:
        return len(served.app.models.get("tale").warm._idle)

    before = asyncio.run(kept())
    with monkeypatch.context() as patched:
        patched.setattr(AsyncDecodeStream, "__anext__", failing)
        unheard = {**ASK, "messages": [{"role": "user", "content": "Nobody asked this."}]}
        assert httpx.post(f"{served.url}{CHAT}", json=unheard, timeout=60).status_code == 500
    assert asyncio.run(kept()) == before
    assert httpx.post(f"{served.url}{CHAT}", json=unheard, timeout=60).status_code == 200
