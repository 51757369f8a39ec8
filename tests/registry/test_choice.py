"""Without a name the best suited backend is chosen, whatever the order of loading."""

from __future__ import annotations

import itertools
import signal
from typing import TYPE_CHECKING, Any

import pytest

from fake_plugin import good
from infercore.errors import (
    BackendNotFoundError,
    BackendUnavailableError,
    InvalidInputError,
    ModelNotFoundError,
    PluginLoadError,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from infercore.registry import Registry

    Install = Callable[..., str]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a file that no known backend reads."""
    path = tmp_path / "model.fake"
    path.write_bytes(b"fake")
    return path


def test_highest_score_wins(install: Install, registry: Registry, model: Path) -> None:
    install("low", good("low", score="0.5", priority=9))
    install("high", good("high", score="2 if path.endswith('.fake') else 0"))
    assert registry.choose(model).name == "high"


@pytest.mark.parametrize("order", list(itertools.permutations("abc")))
def test_then_priority_then_name(
    order: tuple[str, ...], install: Install, registry: Registry, model: Path
) -> None:
    for name in order:
        install(name, good(name, priority=0 if name == "a" else 5))
    assert registry.choose(model).name == "b"


@pytest.mark.parametrize(
    "score", ["1 / 0", "float('nan')", "'much'", "None", "-1", "__import__('sys').exit(3)"]
)
def test_match_that_fails_counts_as_zero(
    score: str, install: Install, registry: Registry, model: Path
) -> None:
    install("odd", good("odd", score=score))
    install("sound", good("sound", score="0.1"))
    assert registry.choose(str(model)).name == "sound"


@pytest.mark.parametrize("kind", [TimeoutError, SystemExit])
@pytest.mark.parametrize("where", ["import", "match"])
def test_what_a_signals_handler_raises_is_no_fault_of_a_plugin(
    where: str, kind: type[BaseException], install: Install, registry: Registry, model: Path
) -> None:
    interrupted = f"__import__('signal').raise_signal({int(signal.SIGTERM)})"
    source = f"{interrupted}\n" + good("one") if where == "import" else ""
    install("one", source or good("one", score=f"({interrupted}, 1)[1]"))

    def handler(*_: object) -> None:
        raise kind("it is time")

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises(kind, match="it is time"):
            registry.choose(model)
        signal.signal(signal.SIGTERM, lambda *_: None)
        assert registry.choose(model).name == "one"
    finally:
        signal.signal(signal.SIGTERM, before)


def test_reason_of_a_failed_match_is_told(
    install: Install, registry: Registry, model: Path
) -> None:
    install("odd", good("odd", score="1 / 0"))
    (match,) = registry.matches(model)
    assert (match.score, "ZeroDivisionError" in str(match.reason)) == (0, True)
    with pytest.raises(BackendNotFoundError, match="odd: match failed: ZeroDivisionError"):
        registry.choose(model)


def test_none_installed(registry: Registry, model: Path) -> None:
    with pytest.raises(BackendNotFoundError, match=r"no backend is installed.*pip install"):
        registry.choose(model)


def test_none_matches(install: Install, registry: Registry, model: Path) -> None:
    install("other", good("other", score="0", formats=("rare",)))
    with pytest.raises(
        BackendNotFoundError, match=r"none of the installed backends reads.*other: rare"
    ) as caught:
        registry.choose(model)
    assert caught.value.candidates == ("other",)


@pytest.mark.parametrize(
    ("path", "content", "name"),
    [
        ("model.gguf", b"", "llamacpp"),
        ("MODEL.GGUF", b"", "llamacpp"),
        ("no_suffix", b"GGUF\x03", "llamacpp"),
        ("model.xml", b"<net/>", "openvino"),
        ("folder/openvino_model.xml", b"<net/>", "openvino"),
    ],
)
def test_known_backend_that_is_not_installed(
    path: str, content: bytes, name: str, install: Install, registry: Registry, tmp_path: Path
) -> None:
    install("other", good("other", score="0"))
    file = tmp_path / path
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    target = file.parent if file.parent.name == "folder" else file
    with pytest.raises(BackendNotFoundError, match=f"pip install ./plugins/{name}"):
        registry.choose(target)


def test_known_backend_that_is_broken(install: Install, registry: Registry, tmp_path: Path) -> None:
    install("llamacpp", "raise RuntimeError('torn library')")
    (tmp_path / "model.gguf").touch()
    with pytest.raises(BackendNotFoundError, match="torn library") as caught:
        registry.choose(tmp_path / "model.gguf")
    assert isinstance(caught.value.__cause__, PluginLoadError)


def test_unusable_backend_is_passed_over(install: Install, registry: Registry, model: Path) -> None:
    source = good("best", score="9").replace("priority=0", "priority=0, check=lambda: 1 / 0")
    install("best", source)
    with pytest.raises(BackendNotFoundError, match=r"best would read .*ZeroDivisionError"):
        registry.choose(model)
    install("next", good("next"))
    registry.refresh()
    assert registry.choose(model).name == "next"


def test_default_from_the_environment(
    install: Install, registry: Registry, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("first", good("first", score="9"))
    install("second", good("second", score="0"))
    monkeypatch.setenv("INFERCORE_BACKEND", "second")
    assert registry.choose(model).name == "second"
    monkeypatch.setenv("INFERCORE_BACKEND", "thrid")
    with pytest.raises(BackendNotFoundError, match=r"'thrid'.*INFERCORE_BACKEND"):
        registry.choose(model)
    monkeypatch.setenv("INFERCORE_BACKEND", "")
    assert registry.choose(model).name == "first"


def test_default_that_is_disabled(
    install: Install, registry: Registry, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("first", good("first"))
    monkeypatch.setenv("INFERCORE_BACKEND", "first")
    monkeypatch.setenv("INFERCORE_DISABLE_PLUGINS", "first")
    with pytest.raises(BackendUnavailableError, match="INFERCORE_DISABLE_PLUGINS"):
        registry.choose(model)


def test_missing_file(install: Install, registry: Registry, tmp_path: Path) -> None:
    install("other", good("other", score="0"))
    with pytest.raises(ModelNotFoundError, match="nothing_here") as caught:
        registry.choose(tmp_path / "nothing_here")
    assert caught.value.path.endswith("nothing_here")


@pytest.mark.parametrize("path", [None, 3, ["a"], object()])
def test_path_that_is_no_path(path: Any, registry: Registry) -> None:
    with pytest.raises(InvalidInputError, match="path"):
        registry.choose(path)


def test_safetensors_are_to_be_converted(
    install: Install, registry: Registry, tmp_path: Path
) -> None:
    install("other", good("other", score="0"))
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(BackendNotFoundError, match="converted first, see docs/how-to/get-a-model"):
        registry.choose(tmp_path)
