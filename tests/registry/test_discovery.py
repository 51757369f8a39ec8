"""A plugin that is broken is listed with its reason and never breaks another."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from fake_plugin import good
from infercore.errors import (
    BackendNotFoundError,
    BackendUnavailableError,
    InvalidInputError,
    InvalidStateError,
    PluginConflictError,
    PluginError,
    PluginLoadError,
    PluginVersionError,
)
from infercore.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Install = Callable[..., str]

HOOKED = "import infercore\n@infercore.hookimpl\ndef infercore_backend():\n    "
BROKEN = {
    "raises": ("raise RuntimeError('no such library')", "no such library"),
    "exits": ("import sys; sys.exit(3)", "SystemExit: 3"),
    "is_no_python": ("def", "SyntaxError"),
    "has_no_hook": ("import infercore", "0 backends"),
    "forgot_marker": ("def infercore_backend(): pass", "it has infercore_backend"),
    "misspells_hook": (
        "import infercore\n@infercore.hookimpl\ndef infercore_bakend(): pass",
        "infercore_bakend",
    ),
    "wants_arguments": (
        "import infercore\n@infercore.hookimpl\ndef infercore_backend(model): pass",
        "model",
    ),
    "hook_raises": (HOOKED + "raise OSError('gone')", "OSError: gone"),
    "returns_none": (HOOKED + "return None", "0 backends"),
    "returns_a_number": (HOOKED + "return 7", "lacks name, api_version, match, loader"),
    "other_name": (good("someone_else"), "someone_else"),
    "match_not_callable": (
        HOOKED + "import types; return types.SimpleNamespace(name='match_not_callable', "
        "api_version=1, match=3, loader=print)",
        "match=3, which must be callable",
    ),
    "formats_a_string": (
        HOOKED + "import types; return types.SimpleNamespace(name='formats_a_string', "
        "api_version=1, match=print, loader=print, formats='gguf')",
        "formats='gguf', which must be a sequence of strings",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_plugin_is_listed_and_the_other_works(
    name: str, install: Install, registry: Registry
) -> None:
    source, reason = BROKEN[name]
    install(name, source)
    install("sound", good("sound"))
    infos = {info.name: info for info in registry.infos()}
    assert infos["sound"].available
    assert not infos[name].available
    assert reason in str(infos[name].reason)
    assert infos[name].distribution == f"infercore-{name}"
    assert infos[name].plugin_version == "1.0"


@pytest.mark.parametrize("name", BROKEN)
def test_broken_plugin_raises_when_named(name: str, install: Install, registry: Registry) -> None:
    install(name, BROKEN[name][0])
    with pytest.raises(PluginLoadError, match=name) as caught:
        registry.get(name)
    assert caught.value.plugin == name
    assert caught.value.distribution == f"infercore-{name}"
    assert caught.value.state_after == "unchanged"


def test_cause_is_kept_and_each_caller_gets_an_error_of_its_own(
    install: Install, registry: Registry
) -> None:
    install("broken", "raise RuntimeError('no such library')")
    errors = []
    for _ in range(2):
        with pytest.raises(PluginLoadError) as caught:
            registry.get("broken")
        errors.append(caught.value)
    assert errors[0] is not errors[1]
    assert all(isinstance(error.__cause__, RuntimeError) for error in errors)


def test_keyboard_interrupt_is_not_swallowed(install: Install, registry: Registry) -> None:
    install("slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        registry.records()


@pytest.mark.parametrize("version", [2, 0, -1, "'1'", None, 1.5, True])
def test_foreign_api_version(version: object, install: Install, registry: Registry) -> None:
    install("other", good("other", api_version=version))
    with pytest.raises(PluginVersionError, match="other"):
        registry.get("other")


def test_same_name_twice_names_both_and_neither_wins(install: Install, registry: Registry) -> None:
    install("twice", good("twice"), distribution="first-dist")
    install("twice", good("twice"), distribution="second-dist")
    records = registry.records()
    assert [record.name for record in records] == ["twice", "twice"]
    assert all(isinstance(record.error, PluginConflictError) for record in records)
    with pytest.raises(PluginConflictError, match="first-dist and second-dist"):
        registry.get("twice")


def test_conflicting_plugins_are_not_imported(install: Install, registry: Registry) -> None:
    modules = [install("twice", good("twice"), distribution=name) for name in ("one", "two")]
    registry.records()
    assert not set(modules) & set(sys.modules)


def test_two_copies_of_one_distribution_are_one(install: Install, registry: Registry) -> None:
    install("copied", good("copied"), distribution="infercore-copied", version="1.0")
    install("copied", good("copied"), distribution="infercore.Copied", version="2.0")
    assert [record.name for record in registry.records()] == ["copied"]


def test_unreadable_metadata_is_listed(install: Install, registry: Registry) -> None:
    install("torn", "", entry_points="[infercore.backends]\nno equals sign here\n")
    install("sound", good("sound"))
    infos = {info.name: info for info in registry.infos()}
    assert infos["sound"].available
    assert "cannot be read" in str(infos["infercore-torn"].reason)


def test_entry_of_a_missing_module(install: Install, registry: Registry) -> None:
    install("lost", "", entry_points="[infercore.backends]\nlost = not_there_at_all\n")
    with pytest.raises(PluginLoadError, match="not_there_at_all") as caught:
        registry.get("lost")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("INFERCORE_DISABLE_PLUGINS", "x, loud"), ("INFERCORE_PLUGINS", "quiet")],
)
def test_environment_acts_before_import(
    variable: str,
    value: str,
    install: Install,
    registry: Registry,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = install("loud", good("loud"))
    install("quiet", good("quiet"))
    monkeypatch.setenv(variable, value)
    assert registry.get("quiet").name == "quiet"
    with pytest.raises(BackendUnavailableError, match=variable):
        registry.get("loud")
    assert module not in sys.modules


@pytest.mark.parametrize("variable", ["INFERCORE_DISABLE_PLUGINS", "INFERCORE_PLUGINS"])
def test_empty_variable_is_as_unset(
    variable: str, install: Install, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("plain", good("plain"))
    monkeypatch.setenv(variable, "")
    assert registry.get("plain").name == "plain"


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        ("raise OSError('no library')", "OSError: no library"),
        (
            "raise infercore.BackendUnavailableError('cannot', backend='picky', reason='no AVX')",
            "no AVX",
        ),
    ],
)
def test_check_that_fails(check: str, reason: str, install: Install, registry: Registry) -> None:
    source = good("picky").replace("priority=0", "priority=0, check=check")
    install("picky", f"{source}\ndef check():\n    {check}\n")
    (info,) = registry.infos()
    assert (info.available, info.reason, info.formats) == (False, reason, ("fake",))
    with pytest.raises(BackendUnavailableError) as caught:
        registry.get("picky")
    assert caught.value.backend == "picky"


def test_infos_tell_versions_and_devices(install: Install, registry: Registry) -> None:
    extra = (
        "engine_version=lambda: '9.9', "
        "devices=lambda: [infercore.DeviceInfo(name='cpu0', kind='cpu')]"
    )
    install("told", good("told").replace("priority=0", f"priority=0, {extra}"))
    (info,) = registry.infos(devices=True)
    assert (info.version, info.devices[0].name, info.reason) == ("9.9", "cpu0", None)
    assert registry.infos()[0].devices == ()


@pytest.mark.parametrize("devices", ["lambda: 1 / 0", "lambda: [3]", "lambda: None"])
def test_devices_that_fail_leave_the_backend_usable(
    devices: str, install: Install, registry: Registry
) -> None:
    install("odd", good("odd").replace("priority=0", f"priority=0, devices={devices}"))
    (info,) = registry.infos(devices=True)
    assert info.available
    assert "devices cannot be listed" in str(info.reason)


def test_engine_that_turns_out_to_be_unusable(install: Install, registry: Registry) -> None:
    source = good("heavy").replace("priority=0", "priority=0, devices=devices")
    raised = "infercore.BackendUnavailableError('cannot', backend='heavy', reason='no AVX')"
    install("heavy", f"{source}\ndef devices():\n    raise {raised}\n")
    (info,) = registry.infos(devices=True)
    assert (info.available, info.reason) == (False, "no AVX")
    assert registry.infos()[0].available


def test_engine_version_that_fails_is_none(install: Install, registry: Registry) -> None:
    source = good("odd").replace("priority=0", "priority=0, engine_version=lambda: 1 / 0")
    install("odd", source)
    (info,) = registry.infos()
    assert (info.available, info.version) == (True, None)


def test_scan_is_kept_until_refresh(install: Install, registry: Registry) -> None:
    assert registry.records() == ()
    install("late", good("late"))
    assert registry.records() == ()
    registry.refresh()
    assert [record.name for record in registry.records()] == ["late"]


def test_plugin_that_asks_its_own_registry_does_not_hang(install: Install) -> None:
    asking = _Entry(lambda: None)
    registry = Registry(entry_points=[asking])
    asking.action = registry.records
    (record,) = registry.records()
    assert isinstance(record.error, PluginLoadError)
    assert isinstance(record.error.__cause__, InvalidStateError)


def test_scanned_once_by_many_threads(install: Install) -> None:
    loads: list[int] = []
    registry = Registry(entry_points=[_Entry(lambda: loads.append(1))])
    threads = [threading.Thread(target=registry.records) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loads == [1]


def test_plugin_that_is_slow_to_import(
    install: Install, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks waits for it, and it is imported once; who leaves it out does not pay for it."""
    log = tmp_path / "imports"
    note = f"with open({str(log)!r}, 'a') as log:\n    log.write('x')\n"
    waiting = f"import time\n{note}time.sleep(0.3)\n"
    install("slow", waiting + good("slow"))
    install("quick", good("quick"))
    monkeypatch.setenv("INFERCORE_DISABLE_PLUGINS", "slow")
    assert registry.get("quick").name == "quick"
    assert not log.exists()
    monkeypatch.delenv("INFERCORE_DISABLE_PLUGINS")
    registry.refresh()
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(registry.get("slow").name)) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["slow"] * 6
    assert log.read_text() == "x"


def test_unknown_name(install: Install, registry: Registry) -> None:
    install("marvel", good("marvel"))
    with pytest.raises(BackendNotFoundError, match="did you mean 'marvel'") as caught:
        registry.get("marvle")
    assert caught.value.name == "marvle"
    assert caught.value.candidates == ("llamacpp", "marvel", "openvino")


@pytest.mark.parametrize("name", ["llamacpp", "openvino"])
def test_known_name_that_is_not_installed(name: str, registry: Registry) -> None:
    with pytest.raises(BackendNotFoundError, match=f"pip install ./plugins/{name}"):
        registry.get(name)


@pytest.mark.parametrize("name", [None, 3, b"llamacpp"])
def test_name_that_is_no_string(name: Any, registry: Registry) -> None:
    with pytest.raises(InvalidInputError, match="backend"):
        registry.get(name)


def test_every_stored_error_is_one_of_ours(install: Install, registry: Registry) -> None:
    for name, (source, _) in BROKEN.items():
        install(name, source)
    assert all(isinstance(record.error, PluginError) for record in registry.records())


class _Entry:
    """An entry point whose import runs ``action``."""

    name = "asking"
    value = "asking_module"
    dist = None

    def __init__(self, action: Callable[[], object]) -> None:
        self.action = action

    def load(self) -> object:
        self.action()
        return object()
