"""Tries a file in a child process: llama.cpp ends the process over some that are corrupt.

Run as ``python -m infercore_llamacpp.trial PATH OPTIONS``, OPTIONS being JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from infercore import ContextConfig, ModelConfig, ModelFormatError
from infercore_llamacpp import child

SECONDS = 600


def check_in_child(path: str, options: Mapping[str, Any]) -> None:
    """Raise `ModelFormatError` where loading ``path`` and evaluating one token fails."""
    given = json.dumps({key: _plain(value) for key, value in options.items()})
    done = child.run(__name__, path, given, seconds=SECONDS)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["it gives no reason"]
        raise ModelFormatError(
            f"{path} failed its trial in a child process: {lines[-1]}", path=path
        )


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else value


def main(path: str, options: str) -> None:
    """Load ``path`` and evaluate one token."""
    from infercore_llamacpp.model import LlamaModel  # noqa: PLC0415  (only in the child)

    model = LlamaModel.load(path, ModelConfig(backend_options=json.loads(options)))
    context = model.new_context(ContextConfig(n_ctx=64, n_ubatch=1, n_batch=1, n_threads=1))
    if not model.info.has_encoder:
        context.decode_one(0)
    context.close()
    model.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
