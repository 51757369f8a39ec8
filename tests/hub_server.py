"""A server that speaks as much of the hub's protocol as fetching a model needs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import attrs
from typing_extensions import Self

if TYPE_CHECKING:
    from collections.abc import Callable

CHUNK = 1 << 16


@attrs.define(kw_only=True)
class Hub:
    """Repositories of files, and what goes wrong with them.

    ``cuts[file]`` lists after how many bytes each of the next answers breaks off; ``stalls[file]``
    is after how many bytes the next answer stops coming, until `stop`; ``served[file]`` is what
    comes in the file's place; ``says`` and ``says_of_files`` are fields of what it says about each
    repository and each file that are not as they should be; ``lies[file]`` answers in the place of
    a file, ``lies[""]`` in that of the list of files; ``requests`` are the method, path and range
    of each request, ``tokens`` what each sent to show who asks.
    """

    repos: dict[str, dict[str, bytes]] = attrs.field(factory=dict)
    gated: set[str] = attrs.field(factory=set)
    cuts: dict[str, list[int]] = attrs.field(factory=dict)
    stalls: dict[str, int] = attrs.field(factory=dict)
    served: dict[str, bytes] = attrs.field(factory=dict)
    says: dict[str, Any] = attrs.field(factory=dict)
    says_of_files: dict[str, Any] = attrs.field(factory=dict)
    status: int | None = None
    lies: dict[str, Callable[[Handler], None]] = attrs.field(factory=dict)
    tokens: list[str | None] = attrs.field(factory=list)
    requests: list[tuple[str, str, str | None]] = attrs.field(factory=list)
    url: str = ""
    _stopped: threading.Event = attrs.field(factory=threading.Event)
    _server: Any = None

    def __enter__(self) -> Self:
        handler = type("OfHub", (Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stopped.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def stall(self) -> None:
        """Block the answer of a request that stops coming."""
        self._stopped.wait(60)

    def commit(self, repo: str) -> str:
        files = {name: git_sha1(data) for name, data in self.repos[repo].items()}
        return git_sha1(json.dumps(files).encode())

    def bodies(self, file: str) -> list[str | None]:
        """The ranges of the requests for the contents of ``file``."""
        return [span for method, path, span in self.requests
                if method == "GET" and path.endswith("/" + file)]  # fmt: skip


def is_large(file: str) -> bool:
    return file.endswith((".gguf", ".bin"))


def git_sha1(data: bytes) -> str:
    head = f"blob {len(data)}\0".encode()
    return hashlib.sha1(head + data, usedforsecurity=False).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        self.hub.tokens.append(self.headers.get("Authorization"))
        if self.hub.status is not None:
            self._send(self.hub.status, b"")
            return
        parts = path.strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        repo = "/".join(parts[2:4] if is_api else parts[:2])
        if repo not in self.hub.repos:
            self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
        elif repo in self.hub.gated and not self.headers.get("Authorization"):
            self._send(403, b"", {"X-Error-Code": "GatedRepo"})
        elif (lie := self.hub.lies.get("/".join(parts[4:]))) is not None:
            with contextlib.suppress(ConnectionError):
                lie(self)
        elif is_api:
            self._send(200, json.dumps(self._about(repo)).encode())
        else:
            self._file(repo, "/".join(parts[4:]))

    def _about(self, repo: str) -> dict[str, Any]:
        siblings = []
        for file, data in self.hub.repos[repo].items():
            one: dict[str, Any] = {"rfilename": file, "size": len(data), "blobId": git_sha1(data)}
            if is_large(file):
                sha = hashlib.sha256(data).hexdigest()
                one["lfs"] = {"sha256": sha, "size": len(data), "pointerSize": 130}
            siblings.append({**one, **self.hub.says_of_files})
        return {"id": repo, "modelId": repo, "sha": self.hub.commit(repo), "private": False,
                "gated": False, "tags": [], "downloads": 0, "likes": 0,
                "siblings": siblings, **self.hub.says}  # fmt: skip

    def _file(self, repo: str, file: str) -> None:
        data = self.hub.repos[repo].get(file)
        if data is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        etag = hashlib.sha256(data).hexdigest() if is_large(file) else git_sha1(data)
        headers = {
            "ETag": f'"{etag}"', "X-Repo-Commit": self.hub.commit(repo), "Accept-Ranges": "bytes",
        }  # fmt: skip
        data, status, span = self.hub.served.get(file, data), 200, self.headers.get("Range")
        if span is not None:
            start = int(span.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            data, status = data[start:], 206
        cuts = self.hub.cuts.get(file, [])
        cut = cuts.pop(0) if cuts and self.command == "GET" else None
        stalls = self.command == "GET" and file in self.hub.stalls
        self._send(status, data, headers, cut=self.hub.stalls.pop(file) if stalls else cut)
        if stalls:
            self.hub.stall()

    def _send(
        self, status: int, data: bytes, headers: dict[str, str] | None = None, *,
        cut: int | None = None,
    ) -> None:  # fmt: skip
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data if cut is None else data[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True
