"""What goes on while the head of a Ray is lost, and after. Last of all: it may be the end."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import openai
import pytest

import infercore
from conftest import start_node, wait_for_two, where

PROMPT = "Once upon a time"


@pytest.mark.skipif(
    not int(os.environ.get("INFERCORE_RAY_REQUESTS", "0")),
    reason="long: INFERCORE_RAY_REQUESTS is not set",
)
def test_the_head_is_lost_and_comes_back(
    cluster: Any, port: int, tale: Any, model_path: str
) -> None:
    with infercore.open_session(model_path, n_ctx=512, n_threads=1) as session:
        session.ensure_prefix(PROMPT)
        wanted = "".join(c.text for c in session.decode(max_tokens=200, temperature=0.0))
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0)

    def ask() -> None:
        made = client.completions.create(
            model="tale", prompt=PROMPT, max_tokens=200, temperature=0, timeout=60
        )
        assert made.choices[0].text == wanted

    if not cluster.worker_nodes:  # another test took it away
        start_node(cluster)
    wait_for_two(tale)
    ask()
    with tale.open_session() as session:
        session.ensure_prefix(PROMPT)
        stream = session.decode(max_tokens=200, temperature=0.0)
        text = next(stream).text
        began = time.monotonic()
        cluster.head_node.kill_gcs_server()
        text += "".join(chunk.text for chunk in stream)
        sys.stderr.write(f"the stream ended {time.monotonic() - began:.1f} s after the head\n")
        assert text == wanted
    ask()  # the front and the replicas need no head
    cluster.head_node.start_gcs_server()
    name, (pid, _) = next(iter(where(tale).items()))
    os.kill(pid, signal.SIGKILL)
    ask()
    until = time.monotonic() + 60
    while name in (found := where(tale)) or len(found) < 2:
        assert time.monotonic() < until, "no other replica came"
        time.sleep(0.2)
    ask()
