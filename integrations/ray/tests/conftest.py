"""A Ray of two nodes on this machine, and two replicas of the storyteller behind the front."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.exceptions import DeploymentUnavailableError

import infercore_models
import infercore_ray

if TYPE_CHECKING:
    from collections.abc import Iterator

POOL = {"n_ctx": 512, "n_parallel": 4, "n_threads": 1}
ON_A_NODE = {"ray_actor_options": {"num_cpus": 0.6}}


_TRIES = 5
NODE = {"include_dashboard": False, "object_store_memory": 100 * 2**20}


def start_node(nodes: Cluster, **resources: Any) -> Any:
    """Start a node, again where a busy machine took longer than Ray waits."""
    wanted = {"num_cpus": 1, **NODE, **resources}
    for number in range(_TRIES):
        if nodes.head_node is None:  # what another had begun to write would be in its way
            os.environ |= {"RAY_gcs_storage_path": f"{os.environ['HOME']}/head{number}"}
        try:
            return nodes.add_node(**wanted)
        except Exception as error:
            if number + 1 == _TRIES or "imed out" not in str(error):
                raise
            sys.stderr.write(f"a node of Ray did not start in time: {error}\n")
    return None


def where(tale: Any) -> dict[str, tuple[int, str]]:
    """Return process and node of each replica that answers."""
    try:
        answers = tale.process._handle.broadcast("where").results(return_exceptions=True)
    except DeploymentUnavailableError:
        return {}
    return {each[0]: each[1:] for each in answers if not isinstance(each, BaseException)}


def wait_for_two(tale: Any) -> dict[str, tuple[int, str]]:
    until = time.monotonic() + 60
    while len(found := where(tale)) < 2:
        assert time.monotonic() < until, "no other replica came"
        time.sleep(0.2)
    return found


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Start Ray with two nodes."""
    with a_cluster() as nodes:
        yield nodes


@contextmanager
def a_cluster() -> Iterator[Cluster]:
    """Start Ray with two nodes, and a folder of its own as HOME."""
    home = tempfile.mkdtemp(prefix="ic", dir="/tmp")  # the paths of sockets have to be short
    own = {
        "HOME": home,
        "RAY_TMPDIR": home,
        "RAY_worker_niceness": "0",  # Ray's own is 15
        "RAY_gcs_storage": "rocksdb",  # a head that comes back knows what there was
        "RAY_gcs_storage_path": "",
    }
    before = {name: os.environ.get(name) for name in own}
    os.environ |= own
    (Path(home) / "ray").mkdir()
    nodes = Cluster()
    try:
        start_node(nodes)
        start_node(nodes)
        ray.init(address=nodes.address, log_to_driver=False)
        yield nodes
    finally:
        ray.shutdown()
        if nodes.head_node is not None:
            nodes.shutdown()
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="session")
def port(cluster: Cluster) -> Iterator[int]:
    """Start Serve; return the port that it listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = int(free.getsockname()[1])
    serve.start(http_options={"host": "127.0.0.1", "port": number})
    yield number
    serve.shutdown()


@pytest.fixture(scope="session")
def model_path() -> str:
    """Return the storyteller's file."""
    return str(Path(infercore_models.path("storyteller", "gguf-f32")))


@pytest.fixture(scope="session")
def tale(port: int, model_path: str) -> Any:
    """Serve two replicas; return a pool on them."""
    app = infercore_ray.build_app({"tale": model_path}, num_replicas=2, **POOL, **ON_A_NODE)
    serve.run(app, name="tale", route_prefix="/")
    return infercore_ray.connect("tale")
