"""Stand-ins for what the command line calls, and real engines for it to call."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from typing import TYPE_CHECKING, Any

import attrs
import pytest
from click.testing import CliRunner

import fake_plugin
import infercore
import pack
from cli.engines import REFERENCE, Engine
from infercore.cli.app import main
from infercore.registry import default_registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from click.testing import Result

N_PREFIX, N_SUFFIX = 600, 40


@attrs.define
class FakeSession:
    """Counts as a session does and tells ``story``."""

    story: tuple[str, ...]
    prefix: str | None = None
    closed: bool = False

    def ensure_prefix(self, text: str) -> Any:
        reused = N_PREFIX if text == self.prefix else 0
        self.prefix = text
        return types.SimpleNamespace(reused_tokens=reused, prefilled_tokens=N_PREFIX - reused)

    def prefill_suffix(self, text: str) -> Any:
        return types.SimpleNamespace(reused_tokens=0, prefilled_tokens=N_SUFFIX)

    def decode(self, *, max_tokens: int, temperature: float) -> Iterator[infercore.StreamChunk]:
        assert temperature == 0
        words = self.story[:max_tokens]
        for number, word in enumerate(words):
            yield infercore.StreamChunk(text=word, tokens=(number,))
        usage = infercore.Usage(
            prompt_tokens=640,
            cached_tokens=600,
            completion_tokens=len(words),
            time_to_first_token_ms=1.0,
            tokens_per_second=250.0,
            seed=None,
        )
        yield infercore.StreamChunk(text="", finish_reason="length", usage=usage)

    def close(self) -> None:
        self.closed = True


@attrs.define
class FakeModel:
    """A model whose sessions all tell ``story``."""

    story: tuple[str, ...]
    sessions: list[FakeSession] = attrs.field(factory=list)
    contexts: list[dict[str, Any]] = attrs.field(factory=list)
    closed: bool = False

    @property
    def tokenizer(self) -> Any:
        return types.SimpleNamespace(encode=lambda text: [])

    def new_session(self, **fields: Any) -> FakeSession:
        self.contexts.append(fields)
        self.sessions.append(FakeSession(self.story))
        return self.sessions[-1]

    def __enter__(self) -> FakeModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True


class Machine:
    """What is installed, as the tests want it; `load` may be replaced."""

    def __init__(self) -> None:
        self.infos: list[infercore.BackendInfo] = []
        self.models: dict[str, FakeModel] = {}
        self.paths: list[str] = []

    def add(self, name: str, story: tuple[str, ...] = ("Once ", "more."), **facts: Any) -> None:
        facts = {"available": True, "formats": ("gguf",), **facts}
        self.infos.append(infercore.BackendInfo(name=name, **facts))
        self.models[name] = FakeModel(story)

    def backends(self, *, devices: bool = False) -> list[infercore.BackendInfo]:
        if devices:
            return list(self.infos)
        return [attrs.evolve(info, devices=()) for info in self.infos]

    def get_backend(self, name: str) -> Any:
        for info in self.infos:
            if info.name == name:
                return types.SimpleNamespace(info=info)
        raise infercore.BackendNotFoundError(f"no backend is named {name!r}", name=name)

    def load_model(self, path: str, *, backend: str) -> FakeModel:
        self.paths.append(path)
        return self.models[backend]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return a machine with no backend, and put it behind the public functions."""
    machine = Machine()
    for name in ("backends", "get_backend"):
        monkeypatch.setitem(vars(infercore), name, getattr(machine, name))
    monkeypatch.setitem(
        vars(infercore), "load_model", lambda path, **named: machine.load_model(path, **named)
    )
    return machine


@pytest.fixture
def model_pack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Stand in for the model pack."""
    pack = types.ModuleType("infercore_models")
    monkeypatch.setattr(pack, "path", lambda name, kind: tmp_path / name / kind, raising=False)
    monkeypatch.setitem(sys.modules, "infercore_models", pack)


@pytest.fixture
def run() -> Callable[..., Result]:
    """Run ``infercore`` with arguments; standard output and error are kept apart."""
    return lambda *arguments: CliRunner().invoke(main, list(arguments))


@pytest.fixture(scope="session")
def reference_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an installed plugin that announces the reference backend."""
    site = tmp_path_factory.mktemp("site")
    fake_plugin.install(site, "reference", REFERENCE)
    return site


def _engine(name: str, site: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Return an engine that is found in this process too, or skip naming what is missing."""
    pack.need_pack()
    import infercore_models

    if name == "reference":
        if importlib.util.find_spec("tokenizers") is None:
            pytest.skip("tokenizers is not installed, with which the reference backend reads text")
        monkeypatch.syspath_prepend(str(site))
        path = infercore_models.path(pack.MODEL, "hf")
    else:
        pack.need_backend(name)
        path = pack.model_path(name)
    default_registry().refresh()
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    for variable in ("NO_COLOR", "FORCE_COLOR", "INFERCORE_BACKEND", "PYTHONIOENCODING"):
        environment.pop(variable, None)
        monkeypatch.delenv(variable, raising=False)
    return Engine(name, str(path), environment)


@pytest.fixture
def reference(reference_site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Return the reference backend, which needs no engine."""
    yield _engine("reference", reference_site, monkeypatch)
    monkeypatch.undo()
    default_registry().refresh()


@pytest.fixture(params=("reference", *sorted(pack.FORMATS)))
def engine(
    request: pytest.FixtureRequest, reference_site: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    """Return each backend that can be used here; the reference backend always can."""
    yield _engine(request.param, reference_site, monkeypatch)
    monkeypatch.undo()
    default_registry().refresh()
