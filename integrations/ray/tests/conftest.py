"""A Ray of this machine, with two replicas of the storyteller behind the HTTP front."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import ray
from ray import serve

import infercore_models
import infercore_ray

if TYPE_CHECKING:
    from collections.abc import Iterator

POOL = {"n_ctx": 512, "n_parallel": 4, "n_threads": 1}
ON_HALF_A_CPU = {"ray_actor_options": {"num_cpus": 0.4}}


@pytest.fixture(scope="session")
def port() -> Iterator[int]:
    """Start Ray, with a folder of its own as HOME; return the port that Serve listens at."""
    home = tempfile.mkdtemp(prefix="ic", dir="/tmp")  # the paths of sockets have to be short
    before = os.environ.get("HOME")
    os.environ["HOME"] = home
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = int(free.getsockname()[1])
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        log_to_driver=False,
        _temp_dir=home,
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": number})
        yield number
        serve.shutdown()
    finally:
        ray.shutdown()
        if before is not None:
            os.environ["HOME"] = before
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="session")
def model_path() -> str:
    """Return the storyteller's file."""
    return str(Path(infercore_models.path("storyteller", "gguf-f32")))


@pytest.fixture(scope="session")
def tale(port: int, model_path: str) -> Any:
    """Serve two replicas; return a pool on them."""
    app = infercore_ray.build_app({"tale": model_path}, num_replicas=2, **POOL, **ON_HALF_A_CPU)
    serve.run(app, name="tale", route_prefix="/")
    return infercore_ray.connect("tale")
