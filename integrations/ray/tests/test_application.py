"""What an application is made of, checked before Ray is started."""

from __future__ import annotations

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


@pytest.mark.parametrize(("goes_on", "load"), [(True, 1), (False, 0)])
def test_a_stream_counts_until_the_next_report(*, goes_on: bool, load: int) -> None:
    router = PrefixRouter.__new__(PrefixRouter)
    router.initialize_state()
    router._routing.keep(["a"])
    route = Route(begins=True, goes_on=goes_on)
    metadata = SimpleNamespace(internal_request_id="one")
    pending: Any = SimpleNamespace(args=[route], metadata=metadata)
    replica: Any = SimpleNamespace(unique_id="a")
    router.on_request_routed(pending, replica, None)
    assert router._routing.load("a") == 1
    router.on_request_completed(replica, "one")
    assert router._routing.load("a") == load
    router._routing.report("a", (), 0)
    assert router._routing.load("a") == 0
