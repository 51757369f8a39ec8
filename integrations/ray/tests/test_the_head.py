"""What goes on while the head of a Ray is lost. Last of all: no Ray is left behind it."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import pytest

import infercore

PROMPT = "Once upon a time"


@pytest.mark.skipif(
    not int(os.environ.get("INFERCORE_RAY_REQUESTS", "0")),
    reason="long: INFERCORE_RAY_REQUESTS is not set",
)
def test_a_stream_goes_on_without_the_head(cluster: Any, tale: Any, model_path: str) -> None:
    with infercore.open_session(model_path, n_ctx=512, n_threads=1) as session:
        session.ensure_prefix(PROMPT)
        wanted = "".join(c.text for c in session.decode(max_tokens=200, temperature=0.0))
    with tale.open_session() as session:
        session.ensure_prefix(PROMPT)
        stream = session.decode(max_tokens=200, temperature=0.0)
        text = next(stream).text
        began = time.monotonic()
        cluster.head_node.kill_gcs_server()
        text += "".join(chunk.text for chunk in stream)
        sys.stderr.write(f"the stream ended {time.monotonic() - began:.1f} s after the head\n")
        assert text == wanted
