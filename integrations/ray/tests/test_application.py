"""What an application is made of, checked before Ray is started."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from infercore.errors import InvalidInputError
from infercore.serve.models import Models
from infercore_ray import application, engines
from infercore_ray.router import PrefixRouter, Route

if TYPE_CHECKING:
    from pathlib import Path


def test_a_file_of_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "build_app", lambda _, config: config.api_keys)
    keys = tmp_path / "keys"
    given = {"path": "model.gguf", "api_key_file": str(keys)}
    keys.write_text("# of the team\n\n first \nsecond\n")
    assert application.app_builder(given) == ("first", "second")
    keys.write_text("# nothing yet\n\n")
    with pytest.raises(InvalidInputError, match="contains no keys"):
        application.app_builder(given)


def test_a_model_on_ray_is_listed_as_isolated() -> None:
    tale = Models({"tale": engines.Opening("model-tale", "app")}, n_warm=0).get("tale")
    pool: Any = SimpleNamespace(effective={}, config=SimpleNamespace(isolate=False))
    tale.pool = pool
    assert tale.facts == {"loaded": True, "n_ctx": None, "isolated": True}


def router_of(*names: str) -> PrefixRouter:
    router = PrefixRouter.__new__(PrefixRouter)
    router.initialize_state()
    router._routing.keep(names)
    return router


def sent(router: PrefixRouter, route: Route, name: str, replica: str = "a") -> None:
    metadata = SimpleNamespace(internal_request_id=name)
    pending: Any = SimpleNamespace(args=[route], metadata=metadata)
    router.on_request_routed(pending, SimpleNamespace(unique_id=replica), None)  # type: ignore[arg-type]


def test_work_counts_until_it_is_answered() -> None:
    router = router_of("a")
    sent(router, Route(begins=True, works=True), "one")
    sent(router, Route(at="a"), "two")
    assert router._routing.load("a") == 1
    for name in ("one", "two", "one"):
        router.on_request_completed(SimpleNamespace(unique_id="a"), name)  # type: ignore[arg-type]
    assert router._routing.load("a") == 0


def test_work_that_ends_before_it_is_said_to_be_routed_does_not_stay() -> None:
    router = router_of("a")
    router.on_request_completed(SimpleNamespace(unique_id="a"), "one")  # type: ignore[arg-type]
    sent(router, Route(begins=True, works=True, blocks=(b"1",)), "one")
    assert router._routing.load("a") == 0
    assert router._routing.n_held("a", (b"1",)) == 1
    assert not router._early
    assert not router._running


def test_a_report_adds_what_others_have_done_there() -> None:
    router = router_of("a")
    sent(router, Route(works=True, origin="here"), "one")
    stats = {"number": 1, "held": (), "load": {"here": 7, "there": 2, "beyond": 1}}
    replica: Any = SimpleNamespace(replica_id=SimpleNamespace(unique_id="a"), routing_stats=stats)
    router._look([replica])
    router._look([replica])
    assert router._routing.load("a") == 1 + 2 + 1


def test_what_a_replica_says_as_it_takes_a_call_tells_what_others_have_it_do() -> None:
    router = router_of("a")
    router._use_replica_queue_len_cache = False
    replica: Any = SimpleNamespace(unique_id="a")
    for name in ("one", "two"):
        router.on_send_request(replica)
        router.on_new_queue_len_info(replica, 5)
        sent(router, Route(works=True), name)
    assert router._routing.load("a") == 3 + 2
    router.on_request_completed(replica, "one")
    assert router._routing.load("a") == 3 + 1
    router.on_send_request(replica)
    router.on_new_queue_len_info(replica, 2)
    assert router._routing.load("a") == 1  # none of others; the new call is not said to be routed
    for name in ("two", "three", "four"):
        router.on_request_completed(replica, name)
    assert router._n_calls["a"] == 0


def test_the_holder_is_tried_twice_and_an_unknown_request_goes_anywhere() -> None:
    router = router_of("a", "b")
    blocks = (b"1", b"2")
    sent(router, Route(at="b", blocks=blocks), "one", "b")  # it ended there
    names = ("a", "b")
    found: Any = [
        SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats={})
        for name in names
    ]
    pending: Any = SimpleNamespace(args=[Route(blocks=blocks, begins=True)])
    (first,), (again,), (other,) = asyncio.run(router.choose_replicas(found, pending))
    assert (first, again, other) == (found[1], found[1], found[0])
    assert asyncio.run(router.choose_replicas(found, None)) == [found]
