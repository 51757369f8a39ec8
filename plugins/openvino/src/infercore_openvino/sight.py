"""What the tokens of each layer look at: all before them, some of those, or with a bias.

The paged form replaces masks by what the engine makes of them, and it knows few: windows and biases
in other forms would be left out in silence. And in the stateful form masks count slots, holes among
them. So a mask is computed here by itself, for the last two of many tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from openvino import PartialShape
from openvino import opset13 as op

from infercore import InferCoreError, UnsupportedFeatureError
from infercore_openvino.engine import BACKEND, logger
from infercore_openvino.limits import compiling, computing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ATTENTION, MASK = "ScaledDotProductAttention", 3
PAGED_ATTENTION, _WINDOW, _SLOPES = "PagedAttentionExtension", 10, 11
STATEFUL = 'backend_options={"form": "stateful"}'
_N_NEW = 2
_MOST = 2**17
_LENGTHS = (8192, 4096, 2048, 1024, 512, 128)
_FAR = 1e4  # below what is looked at, or a little less: what is not
_NOISE = 1e-3


@dataclass(frozen=True)
class Sight:
    """What a layer's tokens look at; ``is_ordered`` where none looks at what comes behind it."""

    is_limited: bool = False
    is_biased: bool = False
    is_ordered: bool = True


def of_layers(core: Any, model: Any, far: int) -> list[Sight] | None:
    """Return the sight of each layer behind up to ``far`` tokens; None if it is not known.

    Behind fewer where a graph has tables that end before. Raises `OutOfMemoryError` and
    `SessionFatalError`.
    """
    layers = [node for node in model.get_ordered_ops() if node.get_type_name() == ATTENTION]
    if not layers:
        return None
    for length in sorted({min(far, _MOST), *(n for n in _LENGTHS if n < far)}, reverse=True):
        rows = _rows_or_none(core, model, length - _N_NEW)
        if rows is not None:
            return [_sight(row) for row in rows] + [
                Sight(is_ordered=layer.get_attributes()["causal"])
                for layer in layers
                if not takes_a_mask(layer)
            ]
    return None


def _rows_or_none(core: Any, model: Any, n_past: int) -> list[Any] | None:
    try:
        return _rows(core, model, n_past)
    except InferCoreError:
        raise
    except (RuntimeError, ValueError, TypeError):  # the engine's, for a graph of another kind
        return None


def check_kept(model: Any, sights: Sequence[Sight] | None, *, has_window: bool) -> None:
    """Raise `UnsupportedFeatureError` where a paged graph leaves out what layers looked at.

    ``has_window``: the config states a window; where ``sights`` are not known, one layer at least
    has to have kept it.
    """
    if sights is None:
        logger.warning("the masks of this graph cannot be looked at: a bias may be lost")
        sights = [Sight(is_limited=has_window)]
    layers = [n for n in model.get_ordered_ops() if n.get_type_name() == PAGED_ATTENTION]
    windows, slopes = (
        sum(_is_set(layer.input_value(place)) for layer in layers) for place in (_WINDOW, _SLOPES)
    )
    for what, n, n_kept in (
        ("a limited sight", sum(s.is_limited for s in sights), windows),
        ("a bias by distance", sum(s.is_biased for s in sights), slopes),
        ("sight of later tokens", sum(not s.is_ordered for s in sights), 0),
    ):
        if n_kept < n:
            raise UnsupportedFeatureError(
                f"the paged form of this model cannot be made: of {n} layers with {what} the "
                f"engine keeps {n_kept}; use {STATEFUL}",
                feature="form",
                backend=BACKEND,
            )


def before(node: Any, *, ends: set[str]) -> Iterator[Any]:
    """Give a node and all that lead to it, as far as nodes of the types ``ends``."""
    waiting, seen = [node], set[str]()
    while waiting:
        found = waiting.pop()
        if found.get_name() not in seen:
            seen.add(found.get_name())
            yield found
            if found.get_type_name() not in ends:
                waiting += [value.get_node() for value in found.input_values()]


def takes_a_mask(node: Any) -> bool:
    """Whether a node is attention with a mask of its own."""
    return (
        node.get_type_name() == ATTENTION
        and not node.get_attributes()["causal"]
        and len(node.inputs()) > MASK
    )


def _is_set(value: Any) -> bool:
    """Whether an argument of the engine's attention is not its zero, or nothing."""
    node = value.get_node()
    return node.get_type_name() != "Constant" or bool(node.data.any())


def _sight(mask: Any) -> Sight:
    """Return what a mask [..., 2, n] says: 0 and far below, with a bias, or as truths.

    From its own place back a token sees all up to the first jump; a bias has none.
    """
    if mask.ndim < _N_NEW or mask.shape[-2] != _N_NEW:  # one number for all tokens: no mask
        return Sight(is_ordered=False)
    values = np.where(mask, 0.0, -np.inf) if mask.dtype == np.bool_ else mask.astype(np.float64)
    values = np.nan_to_num(values, neginf=-_FAR * _FAR)
    is_limited, is_biased, is_ordered = False, False, True
    for i in range(_N_NEW):
        end = values.shape[-1] - _N_NEW + i + 1
        for line in values[..., i, :].reshape(-1, values.shape[-1]):
            own = line[:end][::-1]
            jumps = np.flatnonzero(np.abs(np.diff(own)) > _FAR / 2)
            is_limited |= bool(jumps.size)
            is_biased |= float(np.ptp(own[: jumps[0] + 1 if jumps.size else None])) > _NOISE
            is_ordered &= not bool((line[end:] > own[0] - _FAR / 2).any())
    return Sight(is_limited=is_limited, is_biased=is_biased, is_ordered=is_ordered)


def _rows(core: Any, model: Any, n_past: int) -> list[Any]:
    """Compute the masks of a graph by themselves, without the numbers that only give sizes."""
    graph = model.clone()
    given = _with_sizes(graph, n_past)
    masks = [n.input_value(MASK) for n in graph.get_ordered_ops() if takes_a_mask(n)]
    if not masks:
        return []
    names = [(mask.get_node().get_name(), mask.get_index()) for mask in masks]
    results = [op.result(mask) for mask in dict(zip(names, masks, strict=True)).values()]
    part = type(graph)(results, list(given), "masks")
    part.validate_nodes_and_infer_types()
    _fix_sizes(part)
    needed = {n.get_name() for result in results for n in before(result, ends=set())}
    left = {p: v for p, v in given.items() if p.get_name() in needed}
    part = type(graph)(results, list(left), "masks")
    with compiling("a look at the masks"):
        engine = core.compile_model(part, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    numbers = [
        np.full(port.get_shape(), value, dtype=port.get_element_type().to_dtype())
        for port, value in zip(engine.inputs, left.values(), strict=True)
    ]
    with computing("a look at the masks"):
        found = engine(numbers)
    rows = dict(zip(dict.fromkeys(names), map(np.array, found.values()), strict=True))
    return [rows[name] for name in names]


def _with_sizes(graph: Any, n_past: int) -> dict[Any, Any]:
    """Let a graph be one of two tokens behind others; return its inputs, and what goes in."""
    sizes = {
        "input_ids": ([1, _N_NEW], 0),
        "attention_mask": ([1, n_past + _N_NEW], 1),
        "position_ids": ([1, _N_NEW], np.arange(n_past, n_past + _N_NEW)),
        "beam_idx": ([1], 0),
    }
    given = {}
    for port in graph.inputs:
        shape, value = next(sizes[name] for name in sizes if name in port.get_names())
        port.get_node().set_partial_shape(PartialShape(shape))
        given[port.get_node()] = value
    for node in graph.get_ordered_ops():
        if node.get_type_name() == "ReadValue":
            sizes_of = _state_shape(node.get_output_partial_shape(0), n_past)
            state = op.parameter(sizes_of, node.get_output_element_type(0))
            for user in node.output(0).get_target_inputs():
                user.replace_source_output(state.output(0))
            given[state] = 0
    return given


def _state_shape(shape: Sequence[Any], n_past: int) -> list[int]:
    """Return the shape of a state: its first size is of texts, others that vary are of tokens."""
    varying = [n_past if i else 1 for i in range(len(shape))]
    return [d.get_length() if d.is_static else varying[i] for i, d in enumerate(shape)]


def _fix_sizes(part: Any) -> None:
    """Put numbers where sizes are asked for that are known by now."""
    for node in part.get_ordered_ops():
        if node.get_type_name() == "ShapeOf":
            shape = node.get_input_partial_shape(0)
            if shape.is_static:
                known = op.constant(np.array(shape.to_shape()), node.get_output_element_type(0))
                for user in node.output(0).get_target_inputs():
                    user.replace_source_output(known.output(0))
