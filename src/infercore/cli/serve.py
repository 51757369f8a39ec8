"""``infercore serve``: models behind an HTTP front."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
from typing import TYPE_CHECKING, Any

import click

from infercore.cli.loading import plan_fields
from infercore.cli.options import (
    CONTEXT,
    SectionCommand,
    checked,
    context_options,
    given,
    load_options,
    no_model,
    pool_options,
)
from infercore.cli.terminal import read_file, tell
from infercore.errors import InvalidInputError
from infercore.locating import hub, locate, settings
from infercore.locating.locate import HUB, PACK, is_name
from infercore.values import install
from infercore.values.keys import keys_in
from infercore.values.pool import PoolConfig, served_fields

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


CONTEXT_OF_A_POOL = tuple(name for name in CONTEXT if name not in {"n_seq_max", "pooling_type"})
_OF_SERVER = (
    "max_tokens",
    "request_timeout",
    "reader_timeout",
    "max_body_bytes",
    "max_requests_per_key",
    "n_warm",
)


@click.command(
    cls=SectionCommand,
    examples=[
        "infercore serve model.gguf",
        "infercore serve small=hf:ORG/REPO:Q8_0 --port 8080",
        "infercore serve m.gguf --host 0.0.0.0 --api-key-file keys",
    ],
    short_help="Serve models over HTTP, with the OpenAI protocol.",
)
@click.argument("models", metavar="[NAME=]MODEL...", nargs=-1)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port", default=8000, show_default=True, type=click.IntRange(0, 65535),
    help="The port; 0 picks a free one.",
)  # fmt: skip
@click.option(
    "--api-key-file", metavar="FILE",
    help="API keys, one per line; each request must send one. Callers with the same key share "
         "prefixes.",
)  # fmt: skip
@click.option("--insecure", is_flag=True, help="Allow addresses other than loopback without keys.")
@click.option(
    "--isolate/--no-isolate", default=True, show_default=True,
    help="Run each engine in a process of its own, restarted when it dies.",
)  # fmt: skip
@click.option("--lazy", is_flag=True, help="Load each model on its first request.")
@click.option(
    "--idle-timeout",
    type=float,
    metavar="S",
    help="Unload a model after S seconds without requests.",
)
@click.option("--max-tokens", type=int, metavar="N", help="Maximum number of tokens in an answer.")
@click.option(
    "--request-timeout", type=float, metavar="S", help="Maximum duration of a request in seconds."
)
@click.option(
    "--reader-timeout", type=float, metavar="S",
    help="Cancel a stream whose client reads nothing for S seconds. [default: 60]",
)  # fmt: skip
@click.option(
    "--n-warm", type=int, metavar="N",
    help="Conversations of each model that stay in the engine after their answer. [default: 64]",
)  # fmt: skip
@click.option("--max-body-bytes", type=int, metavar="N", help="Maximum size of a request in bytes.")
@click.option("--max-requests-per-key", type=int, metavar="N", help="Concurrent requests per key.")
@click.option(
    "cors_origins", "--cors-origin", multiple=True, metavar="ORIGIN",
    help="A web origin that may call this server; repeatable. [default: none]",
)  # fmt: skip
@click.option(
    "allowed_hosts", "--allowed-host", multiple=True, metavar="NAME",
    help="A host name, besides localhost, that callers without keys may use; repeatable.",
)  # fmt: skip
@click.option(
    "--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True,
    help="The log's format; prompts are never logged.",
)  # fmt: skip
@pool_options()
@load_options
@context_options(CONTEXT_OF_A_POOL)
def serve(models: tuple[str, ...], **options: Any) -> None:
    """Answer the OpenAI protocol over HTTP, with one pool of sessions for each MODEL.

    A model goes by NAME, or by its file's name. Chats, completions, embeddings, responses,
    reranking, a page to chat at / and metrics at /metrics. Ctrl-C or SIGTERM lets the answers that
    have begun end, for at most 30 seconds.

    Needs the extra 'serve'.
    """
    paths = _named(models)
    keys = _keys(options["api_key_file"])
    _check_address(options["host"], keys, insecure=options["insecure"])
    server = _server_extra()
    fields = {"api_keys": keys, "cors_origins": options["cors_origins"]}
    fields["allowed_hosts"] = options["allowed_hosts"]
    fields |= {name: options[name] for name in _OF_SERVER if options[name] is not None}
    config = checked(server.ServeConfig, fields)
    isolate = options["isolate"]
    opens = {
        name: server.Opening(path, _pool_fields(path, options), isolate=isolate)
        for name, path in paths.items()
    }
    idle = options["idle_timeout"]
    if idle is not None and not idle > 0:  # NaN is not
        raise click.BadParameter("must be more than 0", param_hint="'--idle-timeout'")
    _log(options["log_format"])
    server.observe()
    app = server.App(server.Models(opens, n_warm=config.n_warm), config, idle_timeout=idle)
    where = {name: options[name] for name in ("host", "port", "lazy")}
    server.run(app, **where, say=tell)


def _server_extra() -> Any:
    """Return what serves. A usage error where the extra is not installed."""
    try:
        from infercore.serve import running  # noqa: PLC0415  (the extra)
    except ImportError as error:
        raise click.UsageError(
            f"serving needs more packages; run: {install.of_extra('serve')}"
        ) from error
    return running


def _named(models: Sequence[str]) -> dict[str, str]:
    """Return the paths of models by name."""
    named: dict[str, str] = {}
    for model in models or (settings.default_model() or no_model(),):
        name, equals, path = model.partition("=")
        if not equals or os.path.exists(model):
            name, path = _name_of(model), model
        if not name or not path:
            raise click.UsageError(f"{model!r} is not NAME=MODEL")
        if name in named:
            raise click.UsageError(f"two models are named {name!r}; give NAME=MODEL")
        if not is_name(path):
            locate(path)  # raises what is wrong with it
        named[name] = path
    return named


def _name_of(model: str) -> str:
    """Return what a model goes by without a name of its own."""
    if model.startswith(HUB):
        return hub.parsed(model[len(HUB) :]).repo.rpartition("/")[2]
    if model.startswith(PACK):
        return model[len(PACK) :].partition(":")[0]
    return os.path.splitext(os.path.basename(os.path.normpath(model)))[0]


def _keys(path: str | None) -> tuple[str, ...]:
    if path is None:
        return ()
    try:
        return keys_in(read_file(path), path)
    except InvalidInputError as error:
        raise click.UsageError(str(error)) from error


def _check_address(host: str, keys: Sequence[str], *, insecure: bool) -> None:
    """Refuse to listen for other machines where everybody could call."""
    if keys or insecure or host == "localhost":
        return
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return
    raise click.UsageError(
        f"{host} can be reached from other machines: give --api-key-file FILE, or --insecure"
    )


def _pool_fields(path: str, options: Mapping[str, Any]) -> dict[str, Any]:
    of_pool = given(PoolConfig, options)
    isolate = of_pool.pop("isolate")
    for name in ("step_timeout", "load_timeout"):
        if name in of_pool and not isolate:
            flag = "--" + name.replace("_", "-")
            raise click.UsageError(f"{flag} is of a process of its own: leave out --no-isolate")
    fields = {"backend": options["backend"], **plan_fields(path, options), **of_pool}
    return served_fields(fields)


class _JsonLines(logging.Formatter):
    """A line of JSON for each record."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON."""
        import json  # noqa: PLC0415  (only where asked for)

        row: dict[str, Any] = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if hasattr(record, "elapsed_ms"):
            row["elapsed_ms"] = record.elapsed_ms
        if record.exc_info:
            row["error"] = self.formatException(record.exc_info)
        return json.dumps(row, ensure_ascii=False)


def _log(form: str) -> None:
    handler = logging.StreamHandler()
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(_JsonLines() if form == "json" else plain)
    for name in ("infercore.serve", "infercore.serve.access"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.handlers = [handler]
