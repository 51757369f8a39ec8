"""LoRA adapters: beside each product that they change the graph has one more, with their numbers.

The numbers are inputs, bound to each request, so contexts with other adapters or scales run the
same compiled graph, as long as the same matrices are changed. The weights stay as they are.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino as ov
from openvino import opset13 as op

from infercore import UnsupportedFeatureError
from infercore.weight_files import lora
from infercore_openvino.engine import BACKEND

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from infercore import AdapterSpec
    from infercore_openvino.graph import Graph
    from infercore_openvino.rope import Floats

    Joined = Mapping[str, tuple[Floats, Floats]]

_MODULE = re.compile(r"__module\.(.+?)/")  # as the converter of PyTorch models names what it makes
_MATRIX_RANK = 2


def read(adapters: Sequence[AdapterSpec], graph: Graph) -> Joined:
    """Return A [ranks, n_in] and B [n_out, ranks] of each matrix, all adapters side by side.

    Scales are part of B. Raises what `infercore.weight_files.lora.read` raises, and
    `UnsupportedFeatureError` for a graph whose matrices have no names.
    """
    if not adapters:
        return {}
    shapes = {name: shape for name, (_, shape) in _matrices(graph.model).items()}
    if not shapes:
        hint = "its matrices have no names; export the model with optimum-intel"
        raise UnsupportedFeatureError(
            f"adapters on this graph are not supported on backend {BACKEND!r}; {hint}",
            feature="adapters",
            backend=BACKEND,
            hint=hint,
        )
    target = lora.Target(backend=BACKEND, shapes=shapes, config=graph.config)
    found = [lora.read(adapter, target) for adapter in adapters]
    names = dict.fromkeys(name for pairs in found for name in pairs)  # in one order, for caches
    return {name: _joined([p[name] for p in found if name in p]) for name in names}


def _joined(pairs: Sequence[lora.Pair]) -> tuple[Floats, Floats]:
    a = np.concatenate([pair.a for pair in pairs])
    b = np.concatenate([pair.b * np.float32(pair.scale) for pair in pairs], axis=1)
    return a, b


def _matrices(model: Any) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Return the products with weights by their modules' names, and the weights' [n_out, n_in]."""
    found = {}
    for node in model.get_ordered_ops():
        name = _MODULE.match(node.get_friendly_name())
        if node.get_type_name() != "MatMul" or name is None:
            continue
        shape = node.input_value(1).get_partial_shape()
        if shape.is_static and len(shape) == _MATRIX_RANK:
            turned = node.get_attributes()["transpose_b"]
            sizes = tuple(shape.to_shape())
            found[name[1]] = node, sizes if turned else sizes[::-1]
    return found


def with_inputs(graph: Graph, names: Iterable[str]) -> Graph:
    """Return a copy of ``graph`` with a product beside each of the named ones, and its inputs."""
    model = graph.model.clone()
    matrices = _matrices(model)
    for name in names:
        node, (n_out, n_in) = matrices[name]
        a, b = _input(f"lora_a.{name}", -1, n_in), _input(f"lora_b.{name}", n_out, -1)
        users = node.output(0).get_target_inputs()
        beside = op.matmul(op.matmul(node.input_value(0), a, False, True), b, False, True)
        total = op.add(node, beside).output(0)
        total.set_names(node.output(0).get_names())  # those of the logits
        node.output(0).set_names(set())
        for user in users:
            user.replace_source_output(total)
        model.add_parameters([a, b])
    return replace(graph, model=model)


def _input(name: str, *shape: int) -> Any:
    parameter = op.parameter(list(shape), np.float32, name=name)
    parameter.output(0).set_names({name})
    return parameter


def bind(engine: Any, request: Any, joined: Joined) -> None:
    """Let ``request`` read the numbers where they are; whoever owns it keeps them alive."""
    for name, pair in joined.items():
        for letter, array in zip("ab", pair, strict=True):
            port = engine.input(f"lora_{letter}.{name}")
            request.set_tensor(port, ov.Tensor(array, shared_memory=True))
