"""The files of an exported model, and what its JSON files say."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass, field
from typing import Any

from infercore import ModelFormatError, ModelNotFoundError, read_regular

MODEL_XML = "openvino_model.xml"
POOLING_JSON = os.path.join("1_Pooling", "config.json")
_POOLING_MODES = {
    "mean_tokens": "mean",
    "mean": "mean",
    "cls_token": "cls",
    "cls": "cls",
    "lasttoken": "last",
}
_VARIABLE = re.compile(rb'type="ReadValue"')
_STATE = re.compile(rb'variable_id="([^"]*)"(?:[^>]*variable_shape="([^"]*)")?')
_OF_ATTENTION = re.compile(rb"past_key_values\.\d+\.(key|value)|cache_params\.past\.(key|value)\.")
_RESULT = re.compile(rb'<layer\b[^>]*\btype="Result"[^>]*>')
_OUTPUT_NAMES, _NAMES = (re.compile(rb'\b%snames="([^"]*)"' % kind) for kind in (b"output_", b""))
MAX_GRAPH_BYTES, MAX_JSON_BYTES = 2**30, 2**28
_WEIGHT_RANGE = re.compile(rb'offset="(\d+)" size="(\d+)"')


@dataclass(frozen=True)
class ModelFiles:
    """Where the graph, its weights and the tokenizer lie, and the parsed JSON beside them."""

    xml: str
    bin: str
    folder: str
    has_cache: bool
    keys: tuple[tuple[int, ...], ...]  # heads and head size of each state of keys, or of values
    is_recurrent: bool  # it keeps states that sum up a text, beside keys and values or not
    n_state: int  # numbers in those states, for each sequence
    config: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, Any] = field(default_factory=dict)
    pooling: str = "none"
    outputs: frozenset[str] = frozenset()

    @property
    def of_identity(self) -> tuple[str, ...]:
        """The files by which the model is known: of an encoder also how vectors are pooled."""
        described = os.path.join(self.folder, POOLING_JSON)
        pools = not self.has_cache and os.path.exists(described)
        return (self.xml, self.bin, self.tokenizer_json, *([described] if pools else []))

    @property
    def has_keys(self) -> bool:
        """Whether it keeps keys and values of each token."""
        return bool(self.keys)

    @property
    def numbers_per_token(self) -> int:
        """Numbers that one token takes in the cache, keys and values of all layers together."""
        return sum(math.prod(sizes) for sizes in self.keys if sizes)

    @property
    def ranks(self) -> bool:
        """Whether it gives texts scores: an encoder exported with a head that classifies."""
        if "logits" not in self.outputs or "last_hidden_state" in self.outputs:
            return False
        kinds = self.config.get("architectures")
        named = [str(kind) for kind in kinds] if isinstance(kinds, list) else []
        return not self.has_cache and any(n.endswith("ForSequenceClassification") for n in named)

    @property
    def tokenizer_json(self) -> str:
        """The path of the tokenizer's file, whether or not it is there."""
        return os.path.join(self.folder, "tokenizer.json")

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights file. Raises `ModelNotFoundError` where it is gone."""
        try:
            return os.path.getsize(self.bin)
        except FileNotFoundError as error:
            raise ModelNotFoundError(f"there is no file at {self.bin}", path=self.bin) from error


def xml_of(path: str) -> str | None:
    """Return the graph file that ``path`` (a folder or an .xml file) names, None if it has none."""
    if os.path.isdir(path):
        path = os.path.join(path, MODEL_XML)
    return path if path.lower().endswith(".xml") and os.path.isfile(path) else None


def bin_of(xml: str) -> str:
    """Return the path of the weights that belong to a graph file."""
    return os.path.splitext(xml)[0] + ".bin"


def find(path: str) -> ModelFiles:
    """Return the files of the model at ``path``, checked as far as that needs no engine.

    Raises `ModelNotFoundError` and `ModelFormatError`, which name the file and what is wrong.
    """
    if not os.path.exists(path):
        raise ModelNotFoundError(f"there is no file or folder {path}", path=path)
    xml = xml_of(path)
    if xml is None:
        raise ModelFormatError(
            f"{path} holds no {MODEL_XML}; give the folder of an exported model, or its .xml file",
            path=path,
        )
    weights = bin_of(xml)
    if not os.path.isfile(weights):
        raise ModelFormatError(
            f"{weights} is missing: the weights of {os.path.basename(xml)}; copy both files",
            path=path,
        )
    graph = _read_graph(xml, weights, path)
    states = _states(graph) if _VARIABLE.search(graph) else None  # its cache, if any
    keys = {name for name in states or () if _OF_ATTENTION.match(name)}
    summing = {name: sizes for name, sizes in (states or {}).items() if name not in keys}
    folder = os.path.dirname(os.path.abspath(xml))
    return ModelFiles(
        xml=xml,
        bin=weights,
        folder=folder,
        config=_read_json(folder, "config.json", path),
        generation=_read_json(folder, "generation_config.json", path),
        tokenizer=_read_json(folder, "tokenizer_config.json", path),
        has_cache=states is not None,
        keys=tuple(sizes for name, sizes in (states or {}).items() if name in keys),
        is_recurrent=bool(summing),
        n_state=sum(math.prod(sizes) for sizes in summing.values() if sizes),
        pooling=_pooling(_read_json(folder, POOLING_JSON, path)),
        outputs=_outputs(graph),
    )


def _states(graph: bytes) -> dict[bytes, tuple[int, ...]]:
    """Return the states by name, with those sizes of each that do not vary."""
    found: dict[bytes, tuple[int, ...]] = {name: () for name, _ in _STATE.findall(graph)}
    for name, shape in _STATE.findall(graph):
        if shape:
            found[name] = tuple(int(n) for n in shape.split(b",") if n.isdigit())
    return found


def _outputs(graph: bytes) -> frozenset[str]:
    """Return the names of the outputs; of an old file, which has none apart, all names."""
    own = _OUTPUT_NAMES.findall(b" ".join(_RESULT.findall(graph)))
    return frozenset(b",".join(own or _NAMES.findall(graph)).decode("utf-8", "replace").split(","))


def _pooling(description: dict[str, Any]) -> str:
    """Return the pooling that a description in the way of sentence-transformers asks for."""
    named = description.get("pooling_mode")
    modes = [mode for mode in _POOLING_MODES if description.get(f"pooling_mode_{mode}")]
    found = [named] if isinstance(named, str) else modes
    return _POOLING_MODES.get(found[0], "none") if len(found) == 1 else "none"


def _read_graph(xml: str, weights: str, path: str) -> bytes:
    """Return the graph's file, refused if it is no network or needs more weights than there are."""
    try:
        graph = read_regular(xml, MAX_GRAPH_BYTES)
    except OSError as error:
        raise ModelFormatError(f"{xml} cannot be read: {error}", path=path) from error
    if b"<net" not in graph or not graph.rstrip().endswith(b"</net>"):
        raise ModelFormatError(
            f"{xml} is not an OpenVINO graph, or is incomplete; export or copy it again",
            path=path,
        )
    needed = max((int(m[1]) + int(m[2]) for m in _WEIGHT_RANGE.finditer(graph)), default=0)
    actual = os.path.getsize(weights)
    if actual < needed:
        raise ModelFormatError(
            f"{weights} is truncated: {actual} bytes of at least {needed}; copy it again",
            path=path,
        )
    return graph


def _read_json(folder: str, name: str, path: str) -> dict[str, Any]:
    try:
        found = json.loads(read_regular(os.path.join(folder, name), MAX_JSON_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFormatError(
            f"{os.path.join(folder, name)} cannot be read: {error}", path=path
        ) from error
    if not isinstance(found, dict):
        raise ModelFormatError(f"{os.path.join(folder, name)} is not a JSON object", path=path)
    return found


def read_text(folder: str, name: str) -> str | None:
    """Return the text of a file, None if it is not there. Raises `ModelFormatError`."""
    path = os.path.join(folder, name)
    try:
        return read_regular(path, MAX_JSON_BYTES).decode()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelFormatError(f"{path} cannot be read: {error}", path=folder) from error
