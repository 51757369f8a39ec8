"""The subject's modules, imported from text that may be changed, here and in child processes."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import pickle
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    import ast
    from collections.abc import Mapping

HERE = "INFERCORE_SUBJECT"
"""Names a file with the modules, for processes that laws start."""

_SITE = """
import os, sys
sys.path.append({tools!r})
from mutation import loading
loading.install_from(os.environ[{here!r}])
"""


@attrs.frozen(kw_only=True)
class Module:
    """A module as it is imported: its text, and the file that it comes from."""

    text: str
    file: str
    is_package: bool


class Subject(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the subject's modules, compiled once, one of them perhaps changed."""

    def __init__(self, modules: Mapping[str, Module]) -> None:
        self.modules = modules
        self._code: dict[str, Any] = {}

    def compile_all(self) -> None:
        """Compile what is not changed, before processes are forked."""
        for name, module in self.modules.items():
            self._code[name] = compile(module.text, subject_file(module), "exec", dont_inherit=True)

    def change(self, name: str, tree: ast.Module) -> None:
        """Let the module ``name`` be ``tree``."""
        module = self.modules[name]
        self._code[name] = compile(tree, subject_file(module), "exec", dont_inherit=True)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Return how a module of the subject is loaded, None for others."""
        del path, target
        module = self.modules.get(fullname)
        if module is None:
            return None
        spec = importlib.machinery.ModuleSpec(
            fullname, self, origin=module.file, is_package=module.is_package
        )
        spec.has_location = True
        if module.is_package:
            spec.submodule_search_locations = [str(Path(module.file).parent)]
        return spec

    def exec_module(self, module: Any) -> None:
        """Run the module's code."""
        name = module.__name__
        code = self._code.get(name)
        if code is None:
            described = self.modules[name]
            code = compile(described.text, subject_file(described), "exec", dont_inherit=True)
        exec(code, module.__dict__)  # noqa: S102  (that is how modules are loaded)

    def install(self) -> None:
        """Come before all other ways to import."""
        sys.meta_path.insert(0, self)


def subject_file(module: Module) -> str:
    """Return the name that the subject's code goes by: the oracle may run the same file."""
    return f"{module.file}#subject"


def install_from(path: str) -> None:
    """Import the subject as the process that wrote ``path`` has it."""
    Subject(pickle.loads(Path(path).read_bytes())).install()  # noqa: S301  (our own file)


def announce(folder: Path, entries: Mapping[str, Mapping[str, str]]) -> None:
    """Write a distribution into ``folder`` that announces ``entries``, by group and name."""
    home = folder / "infercore_mutant-0.dist-info"
    home.mkdir(parents=True)
    (home / "METADATA").write_text("Name: infercore-mutant\nVersion: 0\n", encoding="utf-8")
    text = ""
    for group, named in entries.items():
        text += "".join([f"[{group}]\n", *(f"{name} = {to}\n" for name, to in named.items())])
    (home / "entry_points.txt").write_text(text, encoding="utf-8")


def for_children(folder: Path, modules: Mapping[str, Module]) -> None:
    """Let Python processes that are started from here on import the same modules.

    What ``folder`` announces they find too.
    """
    tools = str(Path(__file__).parents[1])
    site = _SITE.format(tools=tools, here=HERE)
    (folder / "sitecustomize.py").write_text(site, encoding="utf-8")
    held = folder / f"modules-{os.getpid()}"
    held.write_bytes(pickle.dumps(dict(modules)))
    os.environ[HERE] = str(held)
    before = os.environ.get("PYTHONPATH", "")
    if str(folder) not in before.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), before]))
