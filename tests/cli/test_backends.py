"""``infercore backends`` lists what is there, and why the rest cannot be used."""

from __future__ import annotations

import json

import infercore


def test_nothing_installed(run, machine) -> None:
    result = run("backends")
    assert result.exit_code == 0
    assert "pip install ./plugins/llamacpp" in result.stdout
    assert "pip install ./plugins/openvino" in result.stdout


def test_table(run, machine) -> None:
    machine.add("fast", version="4.2", distribution="infercore-fast", plugin_version="0.1")
    machine.add("broken", available=False, reason="no [bold]library[/bold]", formats=())
    result = run("backends")
    assert result.exit_code == 0
    (fast,) = [line for line in result.stdout.splitlines() if "fast" in line]
    assert [part for part in ("yes", "4.2", "gguf", "infercore-fast 0.1") if part not in fast] == []
    assert "no [bold]library[/bold]" in result.stdout


def test_json(run, machine) -> None:
    machine.add("openvino", formats=("openvino",))
    listed = json.loads(run("backends", "--json").stdout)
    assert [(info["name"], info["available"]) for info in listed] == [
        ("openvino", True),
        ("llamacpp", False),
    ]
    assert listed[0]["formats"] == ["openvino"]


def test_devices(run, machine) -> None:
    cpu = infercore.DeviceInfo(name="cpu0", kind="cpu", memory_total_bytes=2**30)
    machine.add("fast", devices=(cpu,))
    assert "cpu0" not in run("backends").stdout
    result = run("backends", "--devices")
    assert "cpu0" in result.stdout
    assert "1024" in result.stdout
    assert json.loads(run("backends", "--devices", "--json").stdout)[0]["devices"][0] == {
        "name": "cpu0",
        "kind": "cpu",
        "description": "",
        "memory_total_bytes": 2**30,
        "memory_free_bytes": None,
    }
