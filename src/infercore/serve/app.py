"""The application: routes, and what begins and ends with it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from infercore.serve import chat, completions, openapi, responses, vectors, wire
from infercore.serve.config import ServeConfig
from infercore.serve.errors import ApiError, timed_out
from infercore.serve.guarding import Guard
from infercore.serve.metrics import Metrics
from infercore.serve.models import Models
from infercore.serve.responding import Document, Events, failure, json_response
from infercore.values import checks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping

    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from infercore.session.pool import SessionPool

R = TypeVar("R", bound=wire.Request)
_LOOK_S = 1.0
BODY_S = 30.0
"""Seconds in which the body of a request has to come."""


def create_app(
    pools: SessionPool | Mapping[str, SessionPool], config: ServeConfig | None = None
) -> Callable[..., Awaitable[None]]:
    """Return an ASGI application that answers for ``pools``, by the names that requests use.

    A pool alone goes by its model's name. The pools stay the caller's: close them when the server
    has ended. Raises `InvalidInputError` for anything else.
    """
    built = checks.build(ServeConfig, config, {})
    return App(Models(pools, n_warm=built.n_warm), built)


class App:
    """An ASGI application over models: routes behind a guard.

    ``idle_timeout`` is the number of seconds after which a model that can be opened again is
    unloaded (None = never).
    """

    def __init__(
        self, models: Models, config: ServeConfig, *, idle_timeout: float | None = None
    ) -> None:
        self.models = models
        self.config = config
        self.metrics = Metrics(models)
        self.draining = False
        self._idle_timeout = idle_timeout
        routes = Starlette(
            routes=self._routes(),
            lifespan=self._lifespan,
            exception_handlers={HTTPException: _not_a_route, Exception: _failed},
        )
        self._guard = Guard(routes, config=config, metrics=self.metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one connection."""
        await self._guard(scope, receive, send)

    def _routes(self) -> list[Route]:
        posts: dict[str, tuple[type[wire.Request], Callable[..., Any]]] = {
            "/v1/chat/completions": (wire.ChatRequest, self._chat),
            "/v1/completions": (wire.CompletionRequest, self._completions),
            "/v1/embeddings": (wire.EmbeddingsRequest, self._embeddings),
            "/v1/rerank": (wire.RerankRequest, self._rerank),
            "/v1/responses": (wire.ResponsesRequest, self._responses),
            "/tokenize": (wire.TokenizeRequest, self._tokenize),
            "/detokenize": (wire.DetokenizeRequest, self._detokenize),
        }
        gets: dict[str, Callable[[Request], Any]] = {
            "/v1/models": self._list_models,
            "/v1/models/{name:path}": self._one_model,
            "/health": self._health,
            "/metrics": self._show_metrics,
            "/openapi.json": self._openapi,
            "/": _page,
        }
        kinds = {path: kind for path, (kind, _) in posts.items()}
        self._document = openapi.document(kinds, list(self.models.by_name))
        return [
            *(
                Route(path, _reading(kind, work), methods=["POST"])
                for path, (kind, work) in posts.items()
            ),
            *(Route(path, work, methods=["GET"]) for path, work in gets.items()),
        ]

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        watching = asyncio.create_task(self._unload())
        try:
            yield
        finally:
            self.draining = True
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
            for served in self.models.by_name.values():
                await served.warm.close()

    async def _unload(self) -> None:
        while self._idle_timeout is not None:
            await asyncio.sleep(min(_LOOK_S, self._idle_timeout))
            for served in self.models.by_name.values():
                await served.unload_when_idle(self._idle_timeout)

    # -- text ----------------------------------------------------------------------------------

    def _answered(
        self, request: wire.Sampled | wire.ResponsesRequest, module: Any, asked: Any
    ) -> ASGIApp:
        if request.stream:
            events = module.streamed(request, asked, self.metrics)
            config = self.config
            return Events(
                events, keep_alive=config.keep_alive, reader_timeout=config.reader_timeout
            )
        return Document(module.whole(request, asked, self.metrics))

    async def _chat(self, request: wire.ChatRequest, namespace: str) -> ASGIApp:
        served = self.models.get(request.model)
        return self._answered(request, chat, chat.asked_of(request, served, namespace, self.config))

    async def _completions(self, request: wire.CompletionRequest, namespace: str) -> ASGIApp:
        served = self.models.get(request.model)
        asked = [
            completions.asked_of(request, prompt, served, namespace, self.config)
            for prompt in completions.prompts_of(request)
        ]
        return self._answered(request, completions, asked)

    async def _responses(self, request: wire.ResponsesRequest, namespace: str) -> ASGIApp:
        served = self.models.get(request.model)
        asked = responses.asked_of(request, served, namespace, self.config)
        return self._answered(request, responses, asked)

    # -- vectors and tokens --------------------------------------------------------------------

    def _in_time(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Document:
        """Answer with what comes of ``work``; a call of the engine that has begun is not cut."""

        async def limited() -> Any:
            limit = self.config.request_timeout
            try:
                return await asyncio.wait_for(work(), limit)
            except asyncio.TimeoutError as error:
                raise timed_out("this request was not answered", limit) from error

        return Document(limited())

    async def _embeddings(self, request: wire.EmbeddingsRequest, _: str) -> ASGIApp:
        served = self.models.get(request.model)
        return self._in_time(partial(vectors.embeddings, request, served, self.metrics))

    async def _rerank(self, request: wire.RerankRequest, _: str) -> ASGIApp:
        served = self.models.get(request.model)
        return self._in_time(partial(vectors.rerank, request, served, self.metrics))

    async def _tokenize(self, request: wire.TokenizeRequest, _: str) -> ASGIApp:
        async def tokens() -> Any:
            async with self.models.get(request.model).used() as pool:
                encode = partial(pool.tokenizer.encode, add_special=request.add_special)
                return {"tokens": await asyncio.to_thread(encode, request.prompt)}

        return self._in_time(tokens)

    async def _detokenize(self, request: wire.DetokenizeRequest, _: str) -> ASGIApp:
        async def text() -> Any:
            async with self.models.get(request.model).used() as pool:
                return {"prompt": await asyncio.to_thread(pool.tokenizer.decode, request.tokens)}

        return self._in_time(text)

    # -- facts ---------------------------------------------------------------------------------

    def _row(self, name: str) -> dict[str, Any]:
        served = self.models.get(name)
        head = {"id": name, "object": "model", "created": served.created}
        return {**head, "owned_by": "infercore", "meta": served.facts}

    async def _list_models(self, _: Request) -> Response:
        rows = [self._row(name) for name in self.models.by_name]
        return json_response({"object": "list", "data": rows})

    async def _one_model(self, request: Request) -> Response:
        try:
            return json_response(self._row(request.path_params["name"]))
        except ApiError as error:
            return failure(error)

    async def _health(self, _: Request) -> Response:
        failed = [name for name, served in self.models.by_name.items() if served.failed]
        if self.draining or failed:
            status = {"status": "draining"} if self.draining else {"status": "failed"}
            return json_response({**status, "models": failed}, 503)
        return json_response({"status": "ok"})

    async def _show_metrics(self, _: Request) -> Response:
        text = await asyncio.to_thread(self.metrics.text)  # another process may have to answer
        return Response(text, media_type="text/plain; version=0.0.4")

    async def _openapi(self, _: Request) -> Response:
        return json_response(self._document)


def _reading(kind: type[R], work: Callable[[R, str], Any]) -> Callable[[Request], Any]:
    """Return an endpoint that reads its body strictly before it works."""
    decoder = msgspec.json.Decoder(kind)

    async def endpoint(request: Request) -> ASGIApp:
        try:
            asked = _decoded(decoder, await _body(request))
            request.scope["names"] = asked.names
            wire.check_depth(asked)
            is_n = (getattr(asked, "n", None) or 1) > 1
            request.scope["places"].take(asked.n_places - 1, "n" if is_n else "prompt")
            answer: ASGIApp = await work(asked, request.scope["namespace"])
        except Exception as error:  # noqa: BLE001  (each becomes an answer)
            return failure(error, request.scope.get("names"))
        return answer

    return endpoint


async def _body(request: Request) -> bytes:
    try:
        return await asyncio.wait_for(request.body(), BODY_S)
    except (TimeoutError, asyncio.TimeoutError) as error:
        told = f"the body did not come within {BODY_S:g} seconds"
        raise ApiError(408, told, "timeout_error", code="timeout") from error


def _decoded(decoder: msgspec.json.Decoder[R], body: bytes) -> R:
    try:
        return decoder.decode(body)
    except UnicodeDecodeError as error:
        raise ApiError(400, "the body is not UTF-8") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply") from error


async def _not_a_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    told = ApiError(
        status,
        f"{request.method} {request.url.path} does not exist here",
        headers=dict(getattr(error, "headers", None) or {}),
    )
    return failure(told)


async def _failed(_: Request, error: Exception) -> Response:
    return failure(error)


_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


async def _page(_: Request) -> Response:
    html = resources.files("infercore.serve").joinpath("page.html").read_text("utf-8")
    return Response(html, media_type="text/html", headers=_PAGE_HEADERS)
