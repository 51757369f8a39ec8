"""Fetching models by name on the command line, in a process of its own, as people do."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING

import pytest

from hub_server import Hub

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from subprocess import Popen

pytest.importorskip("huggingface_hub", reason="needs .[hub]")
REPO = "someone/story-GGUF"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        yield server


@pytest.fixture
def call(hub, reference, tmp_path):
    """Run the command with the hub's stand-in, and a cache and settings of its own."""

    def run(*arguments: str, **env: str):
        places = {"HF_HOME": str(tmp_path / "hf"), "INFERCORE_CONFIG_DIR": str(tmp_path / "config")}
        done = reference.run(*arguments, env={"HF_ENDPOINT": hub.url, **places, **env})
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    return run


def test_pull_list_and_read_offline(call, hub, tmp_path) -> None:
    hub.repos[REPO] = {"story-Q4_0.gguf": b"GGUF four", "story-Q8_0.gguf": b"GGUF eight"}
    code, path, said = call("pull", f"hf:{REPO}:Q8_0")
    assert (code, said) == (0, f"fetching hf:{REPO}:Q8_0\n")
    with open(path.strip(), "rb") as file:
        assert file.read() == b"GGUF eight"
    assert path.startswith(str(tmp_path / "hf"))
    assert call("models", "alias", "story", f"hf:{REPO}:Q8_0")[0] == 0
    assert call("models", "default", "story")[0] == 0
    rows = {row["name"]: row for row in json.loads(call("models", "--json")[1])}
    row = rows[f"hf:{REPO}:Q8_0"]
    assert (row["size_bytes"], row["aliases"], row["default"]) == (10, ["story"], True)
    assert row["path"] == path.strip()
    n_requests = len(hub.requests)
    code, _, said = call("inspect", f"hf:{REPO}:Q4_0", HF_HUB_OFFLINE="1")
    assert code == 1
    assert "the cache has: Q8_0" in said
    assert len(hub.requests) == n_requests


def test_a_pull_that_was_killed_goes_on_where_it_was(call, hub, reference, tmp_path) -> None:
    n_bytes, n_sent = 40_000_000, 25_000_000
    hub.repos[REPO] = {"story-Q4_0.gguf": bytes(n_bytes)}
    hub.stalls["story-Q4_0.gguf"] = n_sent
    places = {"HF_HOME": str(tmp_path / "hf"), "INFERCORE_CONFIG_DIR": str(tmp_path / "config")}
    killed = reference.start("pull", f"hf:{REPO}", env={"HF_ENDPOINT": hub.url, **places})
    n_kept = held_bytes(tmp_path / "hf", killed)
    killed.kill()
    killed.wait()
    code, path, _ = call("pull", f"hf:{REPO}")
    assert code == 0
    assert hub.bodies("story-Q4_0.gguf") == [None, f"bytes={n_kept}-"]
    with open(path.strip(), "rb") as file:
        assert file.read() == bytes(n_bytes)
    assert not list((tmp_path / "hf").rglob("*.incomplete"))


def held_bytes(cache: Path, process: Popen[bytes]) -> int:
    """The size of the file that comes, once it has been the same for a while."""
    before = -1
    for _ in range(60):
        assert process.poll() is None, process.communicate()
        size = sum(os.path.getsize(path) for path in cache.rglob("*.incomplete"))
        if size == before > 0:
            return size
        before = size
        time.sleep(0.5)
    raise AssertionError("nothing came")


def test_what_the_hub_has_not(call, hub) -> None:
    hub.repos[REPO] = {"story-Q4_0.gguf": b"GGUF four"}
    code, out, said = call("pull", f"hf:{REPO}:Q9")
    assert (code, out) == (1, "")
    assert said.splitlines()[-1].endswith(f"name one of these, as hf:{REPO}:NAME: Q4_0")
    assert call("pull", "model.gguf")[0] == 1
    assert call("pull", f"hf:{REPO}", "hf:wrong")[2].count("fetching") == 0
    code, _, said = call("inspect", "someone/story-GGUF")
    assert (code, f"write hf:{REPO} to fetch it" in said) == (1, True)
