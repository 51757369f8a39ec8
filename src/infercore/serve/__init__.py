"""An HTTP front over pools of sessions: the OpenAI protocol, on any ASGI server.

``infercore serve MODEL`` runs it; `create_app` makes the application for your own program.
Needs the extra ``serve``.
"""

from __future__ import annotations

from infercore.values import install

try:
    from infercore.serve.app import create_app
except ModuleNotFoundError as error:
    if (error.name or "").split(".")[0] not in {"starlette", "msgspec", "prometheus_client"}:
        raise
    raise ImportError(
        f"serving needs the package {error.name}; run: {install.of_extra('serve')}"
    ) from error
from infercore.serve.config import ServeConfig

__all__ = ["ServeConfig", "create_app"]
