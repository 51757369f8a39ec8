"""What stands before every route: who calls, how much is sent, and from which page."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from infercore.serve.errors import ApiError, server_ended
from infercore.serve.responding import failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from infercore.serve.config import ServeConfig
    from infercore.serve.metrics import Metrics

log = logging.getLogger("infercore.serve.access")
OPEN_PATHS = ("/health", "/")
_MOST_DIGITS = 18  # of a length that a number of 64 bits can hold


class Guard:
    """An ASGI middleware: keys, limits of size and number, CORS, a line of log and a count.

    The key is compared before the body is read. ``scope["namespace"]`` is what callers of one key
    share.
    """

    def __init__(self, app: ASGIApp, *, config: ServeConfig, metrics: Metrics) -> None:
        self._app = app
        self._config = config
        self._metrics = metrics
        self._keys = [(key.encode(), namespace_of(key)) for key in config.api_keys]
        self._n_active: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        status = 0
        origin = self._origin(scope)

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], *_cors(origin)]}
            await send(message)

        try:
            await self._admit(scope, receive, counted, origin)
        except asyncio.CancelledError:  # the server ends, and waited long enough
            if not status:
                await failure(server_ended())(scope, receive, counted)
        finally:
            self._metrics.count_request(status or 499)
            log.info(
                "%s %s %d",
                scope["method"],
                quote(scope["path"]),
                status or 499,
                extra={"elapsed_ms": round(1000 * (time.perf_counter() - began), 1)},
            )

    async def _admit(
        self, scope: Scope, receive: Receive, send: Send, origin: bytes | None
    ) -> None:
        if origin is not None and scope["method"] == "OPTIONS":
            asked = _header(scope, b"access-control-request-headers")
            headers = [*_PREFLIGHT, (b"access-control-allow-headers", asked or _HEADERS)]
            await send({"type": "http.response.start", "status": 204, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            return
        places = _Places(self._n_active, self._n_most)
        try:
            self._check_host(scope)
            places.namespace = namespace = self._namespace(scope)
            if scope["method"] == "POST":
                places.take(1)
            self._check_page(scope, origin)
            self._check_length(scope)
        except ApiError as error:
            places.give_back()
            await failure(error)(scope, receive, send)
            return
        scope["namespace"], scope["places"] = namespace, places
        try:
            await self._app(scope, _Limited(receive, self._config.max_body_bytes), send)
        finally:
            places.give_back()

    @property
    def _n_most(self) -> int:
        return self._config.max_requests_per_key

    def _namespace(self, scope: Scope) -> str:
        if not self._keys or scope["path"] in OPEN_PATHS:
            return ""
        given = _header(scope, b"authorization")
        kind, _, key = given.partition(b" ")
        found = None
        for known, namespace in self._keys:  # all of them, so that the time reveals nothing
            if hmac.compare_digest(known, key.strip()):
                found = namespace
        if kind.lower() != b"bearer" or found is None:
            raise ApiError(
                401,
                "this server asks for a key: send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return found

    def _check_host(self, scope: Scope) -> None:
        """Refuse a name that was made to point here: a page of that name is no other origin.

        Where keys are asked for, or others than this machine reach the server, names say nothing.
        Who gives none (HTTP/1.0 can) is no browser.
        """
        address = (scope.get("server") or ("",))[0]
        name = _name_of(_header(scope, b"host").decode("latin-1"))
        gives_none = all(key != b"host" for key, _ in scope["headers"])
        if self._keys or not _is_loopback(address) or _is_loopback(name) or gives_none:
            return
        if name not in self._config.allowed_hosts:
            raise ApiError(
                403,
                f"this server is not {name!r}; the operator may allow that name",
                code="host_not_allowed",
            )

    def _check_page(self, scope: Scope, origin: bytes | None) -> None:
        """Refuse a web page of another origin: browsers send its POSTs without asking first."""
        given = _header(scope, b"origin")
        host = given.partition(b"://")[2]
        if given and origin is None and host != _header(scope, b"host"):
            raise ApiError(403, "this origin may not call", code="origin_not_allowed")

    def _check_length(self, scope: Scope) -> None:
        length = _header(scope, b"content-length")
        if length.isdigit() and (
            len(length) > _MOST_DIGITS or int(length) > self._config.max_body_bytes
        ):
            raise too_large(self._config.max_body_bytes)

    def _origin(self, scope: Scope) -> bytes | None:
        """Return the origin to be allowed, if the request comes from a page that may call."""
        origin, allowed = _header(scope, b"origin"), self._config.cors_origins
        if not origin or not ("*" in allowed or origin.decode("latin-1") in allowed):
            return None
        return origin


_HEADERS = b"authorization, content-type"
_PREFLIGHT = [
    (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
    (b"access-control-max-age", b"600"),
]


def _name_of(host: str) -> str:
    """Return the name in a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def _is_loopback(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _cors(origin: bytes | None) -> list[tuple[bytes, bytes]]:
    if origin is None:
        return []
    return [
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", b"Retry-After"),
        (b"vary", b"Origin"),
    ]


def _header(scope: Scope, name: bytes) -> bytes:
    headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
    return next((value for key, value in headers if key == name), b"")


def namespace_of(key: str) -> str:
    """Return the namespace of a key: its hash, since names of namespaces reach files."""
    return hashlib.sha256(key.encode()).hexdigest()


def too_large(n_most: int) -> ApiError:
    """Return the refusal of a body beyond the limit."""
    return ApiError(413, f"the body is larger than {n_most} bytes", code="request_too_large")


class _Places:
    """The answers of one request, among those of its key that are given at the same time."""

    def __init__(self, n_active: Counter[str], n_most: int) -> None:
        self.namespace = ""
        self._n_active = n_active
        self._n_most = n_most
        self._n_taken = 0

    def take(self, n: int, param: str | None = None) -> None:
        """Count ``n`` answers more, which ``param`` asks for.

        Raises an `ApiError` of status 429 beyond the limit, of 400 where one request is beyond it.
        """
        if self._n_taken + n > self._n_most:
            raise ApiError(
                400,
                f"{self._n_taken + n} answers are more than the {self._n_most} that one key may "
                "have at the same time",
                param=param,
                code="too_many_answers",
            )
        if self._n_active[self.namespace] + n > self._n_most:
            raise ApiError(
                429,
                f"at most {self._n_most} answers are given to one key at the same time; ask later",
                "rate_limit_error",
                code="too_many_requests",
                headers={"Retry-After": "1"},
            )
        self._n_active[self.namespace] += n
        self._n_taken += n

    def give_back(self) -> None:
        """Count none of them any more."""
        self._n_active[self.namespace] -= self._n_taken
        if not self._n_active[self.namespace]:
            del self._n_active[self.namespace]
        self._n_taken = 0


class _Limited:
    """``receive`` that refuses to read more than ``n_most`` bytes of a body."""

    def __init__(self, receive: Receive, n_most: int) -> None:
        self._receive = receive
        self._n_most = n_most
        self._n_read = 0

    async def __call__(self) -> Any:
        message = await self._receive()
        self._n_read += len(message.get("body", b""))
        if self._n_read > self._n_most:
            raise too_large(self._n_most)
        return message
