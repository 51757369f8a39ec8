"""What an application is made of, checked before Ray is started."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from check_manifest import MANIFEST, models_of
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from infercore.errors import InvalidInputError
from infercore.serve.models import Models
from infercore_ray import application, engines
from infercore_ray.router import PrefixRouter
from infercore_ray.routing import Route
from infercore_ray.scaling import WAITING

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


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"num_replicas": 0}, "num_replicas"),
        ({"num_replicas": True}, "num_replicas"),
        ({"num_replicas": "auto"}, "num_replicas"),
        ({"num_fronts": 0}, "num_fronts"),
        ({"n_cxt": 512}, "n_cxt"),
        ({"n_ctx": "many"}, "n_ctx"),
        ({"isolate": True}, "isolate"),
        ({"config": {"n_warm": 1}}, "config"),
        ({"backend": 7}, "backend"),
        ({"ray_actor_options": {"num_cpu": 1}}, "ray_actor_options"),
        ({"ray_actor_options": {"num_cpus": "two"}}, "ray_actor_options"),
        ({"ray_actor_options": 3}, "ray_actor_options"),
        ({"autoscaling_config": {"max_replica": 2}}, "autoscaling_config"),
        ({"autoscaling_config": {"max_replicas": 0}}, "autoscaling_config"),
        ({"autoscaling_config": {"target_waiting_tokens": 0}}, "target_waiting_tokens"),
        ({"autoscaling_config": {"policy": {"policy_function": "no:where"}}}, "autoscaling_config"),
        ({"autoscaling_config": {"max_replicas": 2}, "num_replicas": 2}, "num_replicas"),
        (
            {"autoscaling_config": {"target_waiting_tokens": 9, "policy": {"policy_kwargs": {}}}},
            "target_waiting_tokens",
        ),
    ],
)
def test_what_is_no_option_is_refused_by_name(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError) as raised:
        application.build_app("model.gguf", **given)
    named = raised.value.value if raised.value.field in {"PoolConfig", "pool"} else None
    assert field in {raised.value.field, named}


def test_a_model_s_own_scaling_takes_the_place_of_what_all_have() -> None:
    models = {"a": {"path": "a.gguf", "autoscaling_config": {"max_replicas": 3}}, "b": "b.gguf"}
    given = {"autoscaling_config": {"max_replicas": 2}}
    own = application._model(models["a"], given)
    other = application._model(models["b"], given)
    found = [(each.autoscaling_config or {}).get("max_replicas") for each in (own, other)]
    assert found == [3, 2]
    assert application.build_app(models, **given) is not None


@pytest.mark.parametrize(
    "models", [{}, {"": "a.gguf"}, {"a#b": "a.gguf"}, {"a": {"n_ctx": 512}}, {"a": 7}, 7, None]
)
def test_what_names_no_model_is_refused(models: Any) -> None:
    with pytest.raises(InvalidInputError):
        application.build_app(models)


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"path": "a", "models": {"a": "a"}},
        {"path": "a", "n_cxt": 1},
        {"path": "a", "port": 1},
        3,
    ],
)
def test_what_is_no_argument_of_a_yaml_is_refused(args: Any) -> None:
    with pytest.raises(InvalidInputError):
        application.app_builder(args)


@pytest.mark.parametrize(("n_calls", "waiting", "wanted"), [(12, {}, 3), (1, {"a": 900.0}, 9)])
def test_calls_and_waiting_tokens_say_how_many_replicas_there_should_be(
    n_calls: int, waiting: dict[str, float], wanted: float
) -> None:
    given = {"max_replicas": 9, "target_waiting_tokens": 100}
    options = application._scaling(given, {}, {"n_parallel": 4})
    config = AutoscalingConfig(**options)
    policy = config.policy.get_policy()(**config.policy.policy_kwargs)
    context = SimpleNamespace(
        current_num_replicas=2, total_num_requests=n_calls, config=config,
        aggregated_metrics={WAITING: waiting}, target_num_replicas=0,
    )  # fmt: skip
    assert policy(context) == (wanted, {})
    context.current_num_replicas = 0
    assert policy(context) == (0, {})


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
    asked = {"here": (7, 9, ()), "there": (2, 3, ()), "beyond": (1, 1, ())}
    stats = {"number": 1, "held": (), "asked": asked}
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


def reporting(number: int, asked: dict[str, Any], held: tuple[bytes, ...] = ()) -> Any:
    stats = {"number": number, "held": held, "asked": asked}
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id="a"), routing_stats=stats)


def test_reports_that_come_late_take_nothing_from_what_was_sent_after_them() -> None:
    router = router_of("a")
    blocks = (b"1", b"2")
    sent(router, Route(works=True, origin="here", number=7, blocks=blocks), "one")
    for number, asked in enumerate([{}, {"here": (0, 6, ())}, {"here": (1, 8, (7, 8))}], 1):
        router._look([reporting(number, asked)])
        assert router._routing.n_held("a", blocks) == 2
    router._look([reporting(4, {"here": (0, 8, ())}, blocks[:1])])
    assert router._routing.n_held("a", blocks) == 1


def test_what_others_had_to_do_counts_no_more_when_reports_stay_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=100.0)
    monkeypatch.setattr("infercore_ray.router.time", clock)
    router, report = router_of("a"), reporting(1, {"there": (4, 4, ())})
    router._look([report])
    clock.now += 4
    router._look([report])
    assert router._routing.load("a") == 4
    clock.now += 2
    router._look([report])
    assert router._routing.load("a") == 0


def test_calls_that_end_while_a_replica_answers_are_not_others() -> None:
    router = router_of("a")
    router._use_replica_queue_len_cache = False
    replica: Any = SimpleNamespace(unique_id="a")
    for _ in range(4):
        router.on_send_request(replica)
    for name in ("one", "two", "three"):  # it took the fourth before these were over
        router.on_request_completed(replica, name)
    router.on_new_queue_len_info(replica, 4)
    assert router._routing.load("a") == 0


def test_a_holder_on_a_busy_machine_is_waited_for() -> None:
    async def late(*, deadline_s: float) -> int:
        del deadline_s
        await asyncio.sleep(0.3)
        return 0

    router = router_of("a")
    router._use_replica_queue_len_cache = False
    router._lazily_fetched_loop = None
    holder: Any = SimpleNamespace(
        replica_id=type("Id", (), {"unique_id": "a"})(),
        get_queue_len=late,
        max_ongoing_requests=9,
    )
    router._replicas = {holder.replica_id: holder}
    router._replica_queue_len_cache = SimpleNamespace(update=lambda *_: None)  # type: ignore[assignment]
    router._update_router_queue_len_gauge = lambda *_: None  # type: ignore[method-assign]

    async def selected() -> Any:
        return await router._select_from_candidate_replicas([holder], 0)

    assert asyncio.run(selected()) is holder


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


def test_the_manifest_for_kubernetes_makes_an_application() -> None:
    manifest = yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))
    assert models_of(manifest) == ["infercore"]


def test_the_router_knows_a_route_where_serve_copied_it_to(tmp_path: Path) -> None:
    copy = tmp_path / "router"
    config = RequestRouterConfig(request_router_class=PrefixRouter)
    copy.write_bytes(config.get_serialized_request_router_cls())
    program = (
        "import sys; from ray import cloudpickle; from infercore_ray import engines\n"
        "router = cloudpickle.loads(open(sys.argv[1], 'rb').read())\n"
        "assert router.choose_replicas.__globals__['Route'] is engines.Route"
    )
    subprocess.run([sys.executable, "-c", program, str(copy)], check=True)
