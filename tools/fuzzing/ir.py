"""OpenVINO models with damage in graph, weights or JSON: a typed error, or a model that runs."""

from __future__ import annotations

import importlib
import pkgutil
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from fuzzing._bytes import NUMBERS, damaged
from fuzzing._forked import loaded
from fuzzing.gguf import use

if TYPE_CHECKING:
    from random import Random

LIMIT_S = 150.0
BATCH = 50
_TYPE = re.compile(rb'type="(\w+)"')
_NUMBER = re.compile(rb'(?<=[">,])-?\d+(?=["<,])')
_ATTRIBUTE = re.compile(rb'\w+="[^"]*"')


class Ir:
    """Loads a changed folder and evaluates a text with it."""

    def __init__(self) -> None:
        import infercore_models  # noqa: PLC0415

        _import_all()
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name) / "model"
        self._models = [
            infercore_models.path(name, "openvino") for name in ("storyteller", "encoder")
        ]

    def case(self, random: Random) -> str:
        """Change one file of a model, load it, and use what was loaded."""
        shutil.rmtree(self._path, ignore_errors=True)
        shutil.copytree(random.choice(self._models), self._path)
        names = sorted(file.name for file in self._path.iterdir() if file.is_file())
        name = random.choice([*names, *3 * ["openvino_model.xml"], *2 * ["openvino_model.bin"]])
        file = self._path / name
        data = file.read_bytes()
        file.write_bytes(edited(data, random) if name.endswith(".xml") else damaged(data, random))
        return f"{name}, {loaded('openvino', str(self._path), use)}"


def _import_all() -> None:
    """Import what a load does, and start no engine: a fork would lack its threads."""
    import infercore_openvino  # noqa: PLC0415

    for found in pkgutil.iter_modules(infercore_openvino.__path__):
        if found.name != "conformance":
            importlib.import_module(f"infercore_openvino.{found.name}")


def edited(graph: bytes, random: Random) -> bytes:
    """Return a graph with a type, a number or an attribute changed; now and then only damaged."""
    kind = random.choice((_TYPE, _TYPE, _NUMBER, _NUMBER, _ATTRIBUTE, None))
    if kind is None:
        return damaged(graph, random)
    found = random.choice(list(kind.finditer(graph)))
    if kind is _TYPE:
        fresh = b'type="' + random.choice(_TYPE.findall(graph)) + b'"'
    elif kind is _NUMBER:
        fresh = str(random.choice((*NUMBERS, -1, -2, 5, 31, 33))).encode()
    else:
        fresh = random.choice(_ATTRIBUTE.findall(graph))
    return graph[: found.start()] + fresh + graph[found.end() :]


def open_target() -> Ir:
    """Return the target."""
    return Ir()
