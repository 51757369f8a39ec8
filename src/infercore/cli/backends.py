"""``infercore backends``: what is installed, and why the rest cannot be used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import click

import infercore
from infercore.cli.output import print_json, print_table
from infercore.registry.known import KNOWN

if TYPE_CHECKING:
    from collections.abc import Sequence

COLUMNS = ("name", "available", "version", "formats", "reason", "distribution")
DEVICE_COLUMNS = ("backend", "device", "kind", "description", "memory MiB")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--devices", is_flag=True, help="List devices too; this imports the engines.")
def backends(as_json: bool, devices: bool) -> None:  # noqa: FBT001  (click passes flags)
    """List the backends, with the reason why one cannot be used."""
    infos = [*infercore.backends(devices=devices)]
    infos += missing(infos)
    if as_json:
        print_json([attrs.asdict(info) for info in infos])
        return
    print_table(COLUMNS, [_row(info) for info in infos])
    if devices:
        rows = [row for info in infos for row in _device_rows(info)]
        print_table(DEVICE_COLUMNS, rows, right=("memory MiB",))


def missing(infos: Sequence[infercore.BackendInfo]) -> list[infercore.BackendInfo]:
    """Return the backends of this project that are not among ``infos``, with the command."""
    names = {info.name for info in infos}
    return [
        infercore.BackendInfo(
            name=known.name, available=False, reason=f"not installed; run: {known.install}"
        )
        for known in KNOWN.values()
        if known.name not in names
    ]


def _row(info: infercore.BackendInfo) -> Sequence[str]:
    parts = [part for part in (info.distribution, info.plugin_version) if part]
    return (
        info.name,
        "yes" if info.available else "no",
        info.version or "",
        ", ".join(info.formats),
        info.reason or "",
        " ".join(parts),
    )


def _device_rows(info: infercore.BackendInfo) -> list[Sequence[str]]:
    return [
        (info.name, device.name, device.kind, device.description, _mebibytes(device))
        for device in info.devices
    ]


def _mebibytes(device: infercore.DeviceInfo) -> str:
    total = device.memory_total_bytes
    return "" if total is None else str(total // 2**20)
