"""Stand-ins for what the command line calls: backends, models and sessions that need no engine."""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

import attrs
import pytest
from click.testing import CliRunner

import infercore
from infercore.cli import main

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
