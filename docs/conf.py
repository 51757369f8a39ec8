"""How Sphinx builds these pages: ``tox -e docs``, with every warning an error."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from infercore import __version__
from infercore.values.install import REPOSITORY

project = "infercore"
author = "infercore contributors"
copyright = author  # noqa: A001  (the name that Sphinx reads)
release = version = __version__

extensions = [
    "myst_parser",  # Markdown, which is readable on its own
    "sphinx.ext.autodoc",  # the API reference is what the docstrings say
    "field_tables",  # tables of configs and errors, from the classes
    "every_name",  # a public name that no page has is a warning
    "searched",  # so are words that people search for and that do not find their page
]
exclude_patterns = ["_build", "_ext", "diagrams"]

# -- Markdown ---------------------------------------------------------------------------------
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

smartquotes = False  # quotes in tables are those of Python

# -- docstrings -------------------------------------------------------------------------------
default_role = "py:obj"  # single backticks in a docstring refer to a name
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "undoc-members": True}
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

# -- references -------------------------------------------------------------------------------
nitpicky = True
# Names of Python, NumPy and attrs: the build asks no server for their inventories.
nitpick_ignore_regex = [
    ("py:.*", r"(collections|contextlib|typing|types|os|random|numpy|np|npt|attrs|asyncio)\..*"),
    ("py:.*", r"(Any|Callable|Generator|Iterator|Literal|Mapping|Self|Sequence|TracebackType)"),
    ("py:.*", r"(BaseException|Exception|[A-Z]\w*Error|None|True|False)"),
    ("py:.*", r"(bool|bytes|dict|dict\[str|float|int|list|object|str|tuple|type)"),
    (
        "py:class",
        r"infercore\.(session\.(runner|homes|session)|conformance\.oracle|weight_files\.gguf)\..*",
    ),  # how a pool is made inside
    ("py:class", r"(pathlib\.Path|NDArray|infercore\.testing\.faults\.FaultyModel)"),
    (
        "py:class",
        r"(FloatArray|TokenArray|ControlVector|AnyPath|\w+Fields|FinishReason|Pooling|CoreSession|SessionContext|A|T|StateAfter|Standing|SessionModel|Observer|optional)",
    ),  # short names of types
]

# -- the site ---------------------------------------------------------------------------------
html_theme = "furo"
html_title = f"infercore {__version__}"
if REPOSITORY:
    html_theme_options = {
        "source_repository": REPOSITORY,
        "source_branch": "main",
        "source_directory": "docs/",
    }
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_show_sphinx = False
html_copy_source = False
