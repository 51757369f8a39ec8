"""What a context may add to the graph: LoRA adapters, rows in place of tokens, control vectors.

All of it is inputs of a copy of the graph, bound to each request, so contexts with other numbers
run the same compiled graph as long as the same places are changed. The weights stay as they are.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino as ov
from openvino import opset13 as op

from infercore import UnsupportedFeatureError
from infercore_openvino import adapters as lora
from infercore_openvino.engine import BACKEND

if TYPE_CHECKING:
    from infercore_openvino.adapters import Joined
    from infercore_openvino.graph import Graph
    from infercore_openvino.rope import Floats

_ROWS, _PLACES, _DIRECTIONS = "given_rows", "given_places", "control_vector"
_HIDDEN_RANK = 3
# Their table gives rows multiplied by sqrt(n_embd), and rows from elsewhere are not; other models
# multiply both. As Hugging Face's and llama.cpp's do it.
_SCALED_BY_TABLE = ("gemma3", "gemma4")
# as the converter of PyTorch models names the sum that ends a layer
_LAYER_SUM = re.compile(r"__module\.(?:\w+\.)*(?:layers|h|blocks)\.(\d+)/aten::add_?/Add(?:_\d+)?$")


@dataclass(frozen=True)
class Additions:
    """What is added: matrices of adapters, [n_layer, n_embd] to what the layers put out, rows."""

    adapters: Joined = field(default_factory=dict)
    directions: Floats | None = None
    takes_rows: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """What decides about the graph; the numbers do not."""
        return (*sorted(self.adapters), self.directions is not None, self.takes_rows)

    def bind(self, engine: Any, request: Any) -> None:
        """Give ``request`` the numbers. It reads those of adapters here, where they stay alive."""
        lora.bind(engine, request, self.adapters)
        if self.takes_rows:
            give_rows(request, np.empty((0, _width(engine.input(_ROWS))), dtype=np.float32))
        if self.directions is not None:
            request.set_tensor(_DIRECTIONS, ov.Tensor(self.directions))


def give_rows(request: Any, rows: Floats) -> None:
    """Let the first tokens of the next steps be ``rows`` instead; none ends that."""
    request.set_tensor(_ROWS, ov.Tensor(rows))
    request.set_tensor(_PLACES, ov.Tensor(np.arange(len(rows), dtype=np.int64)))


def _width(port: Any) -> int:
    width: int = port.get_partial_shape()[1].get_length()
    return width


def with_additions(graph: Graph, added: Additions) -> Graph:
    """Return a copy of ``graph`` with the inputs of ``added``, or itself where there are none.

    Raises `UnsupportedFeatureError` where the graph shows no place for them.
    """
    if added.adapters:
        graph = lora.with_inputs(graph, added.adapters)
    if added.takes_rows:
        graph = _with_rows(graph)
    if added.directions is not None:
        graph = _with_directions(graph)
    return graph


def _with_rows(graph: Graph) -> Graph:
    model = graph.model.clone()
    tables = _lookups(model)
    looked_up = _as_float(tables[0], graph.shape.n_embd) if len(tables) == 1 else None
    if looked_up is None:
        raise _refuse(
            "rows of numbers in place of tokens", "its graph shows no one table that tokens look up"
        )
    if str(graph.config.get("model_type")).startswith(_SCALED_BY_TABLE):
        looked_up = _scaled(looked_up)
    users = looked_up.output(0).get_target_inputs()
    rows = _input(_ROWS, np.float32, -1, graph.shape.n_embd)
    places = _input(_PLACES, np.int64, -1)
    tokens, other = (0, 1) if graph.form == "paged" else (1, 0)
    in_place = op.scatter_update(
        looked_up,
        places,
        op.unsqueeze(rows, op.constant(other, dtype=np.int64)),
        op.constant(tokens, dtype=np.int64),
    ).output(0)
    for user in users:
        user.replace_source_output(in_place)
    return _grown(graph, model, rows, places)


def _lookups(model: Any) -> list[Any]:
    """Return the nodes that look tokens up in a table."""
    waiting, found = [model.input("input_ids").get_node()], []
    while waiting:
        node = waiting.pop()
        for target in node.output(0).get_target_inputs():
            user = target.get_node()
            kind = user.get_type_name()
            if kind == "Gather" and target.get_index() == 1:
                found.append(user)
            elif kind in {"Convert", "Unsqueeze", "Reshape"}:
                waiting.append(user)
    return found


def _scaled(node: Any) -> Any:
    """Return the product of ``node`` with one number, where that is all it is used for."""
    users = [t for t in node.output(0).get_target_inputs() if not _is(t.get_node(), "ShapeOf")]
    if len(users) != 1 or not _is(users[0].get_node(), "Multiply"):
        return node
    product = users[0].get_node()
    return product if any(map(_is_one_number, product.input_values())) else node


def _is_one_number(value: Any) -> bool:
    node = value.get_node()
    while _is(node, "Convert"):
        node = node.input_value(0).get_node()
    return _is(node, "Constant") and math.prod(node.get_output_shape(0)) == 1


def _is(node: Any, kind: str) -> bool:
    return bool(node.get_type_name() == kind)


def _as_float(node: Any, n_embd: int) -> Any:
    users = list(node.output(0).get_target_inputs())
    if node.get_element_type().to_string() != "f32" and len(users) == 1:
        node = users[0].get_node()
    shape = node.output(0).get_partial_shape()
    fits = shape.rank.is_static and len(shape) == _HIDDEN_RANK and shape[2] == n_embd
    return node if fits and node.get_element_type().to_string() == "f32" else None


def _with_directions(graph: Graph) -> Graph:
    model = graph.model.clone()
    n_layer, n_embd = graph.shape.n_layer, graph.shape.n_embd
    found = _layer_sums(model, n_embd)
    if sorted(found) != list(range(n_layer)):
        raise _refuse(
            "set_control_vector", "the layers of its graph have no names; export with optimum-intel"
        )
    given = _input(_DIRECTIONS, np.float32, n_layer, n_embd)
    axis = op.constant(0, dtype=np.int64)
    for layer, node in found.items():
        users = node.output(0).get_target_inputs()
        row = op.gather(given, op.constant(layer, dtype=np.int64), axis)
        total = op.add(node, row).output(0)
        for user in users:
            user.replace_source_output(total)
    return _grown(graph, model, given)


def _layer_sums(model: Any, n_embd: int) -> dict[int, Any]:
    """Return the last sum of each layer: what it puts out."""
    found = {}
    for node in model.get_ordered_ops():
        name = _LAYER_SUM.match(node.get_friendly_name())
        if node.get_type_name() != "Add" or name is None:
            continue
        if node.output(0).get_partial_shape()[-1] == n_embd:
            found[int(name[1])] = node
    return found


def _input(name: str, kind: Any, *shape: int) -> Any:
    parameter = op.parameter(list(shape), kind, name=name)
    parameter.output(0).set_names({name})
    return parameter


def _grown(graph: Graph, model: Any, *parameters: Any) -> Graph:
    model.add_parameters(list(parameters))
    return replace(graph, model=model)


def _refuse(feature: str, hint: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(feature=feature, backend=BACKEND, hint=hint)
