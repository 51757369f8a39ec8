"""The model's graph: read, checked, and brought into the form that a context runs.

In the *paged* form attention reads keys and values from blocks that are inputs of the graph, so
they are arrays of our own: trimming is a change of an integer, a fork shares blocks. In the
*stateful* form they are variables inside the engine. Both forms get two more inputs,
``out_rows`` and ``hidden_rows``: which tokens get logits, and which hidden states.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from openvino import opset13 as op

from infercore import ModelFormatError, UnsupportedFeatureError
from infercore_openvino import rope
from infercore_openvino.engine import BACKEND, first_lines, logger, memory_errors
from infercore_openvino.facts import n_sliding, sliding_window, whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from infercore_openvino.files import ModelFiles
    from infercore_openvino.rope import Floats, Rope

RECURRENT = "recurrent"
_CAUSAL_INPUTS = {"input_ids", "attention_mask", "beam_idx"}
_LOGITS_RANK = 3
_ATTENTION, _MASK, _FAR = "ScaledDotProductAttention", 3, 1e9
_PAGED_ATTENTION, _KEY, _WINDOW = "PagedAttentionExtension", 1, 10
_STATEFUL = 'backend_options={"form": "stateful"}'
_F16_RELATIVE_ERROR = 2e-3


@dataclass(frozen=True)
class Shape:
    """What the graph itself says about the model."""

    n_vocab: int
    n_embd: int
    n_layer: int
    n_params: int


@dataclass(frozen=True)
class Graph:
    """A graph in one form.

    ``inv_freq`` are its rotary frequencies, None if not found; ``config`` is the model's
    ``config.json``.
    """

    model: Any
    form: str
    shape: Shape
    inv_freq: Floats | None
    config: Mapping[str, Any]

    @property
    def slides(self) -> bool:
        """Whether layers look back over a window only."""
        return sliding_window(self.config) is not None

    @property
    def turns_keys(self) -> bool:
        """Whether each layer of a paged graph turns its keys: some models leave layers out."""
        layers = [n for n in self.model.get_ordered_ops() if n.get_type_name() == _PAGED_ATTENTION]
        return self.inv_freq is not None and all(_is_turned(n.input_value(_KEY)) for n in layers)


def build(core: Any, files: ModelFiles, form: str, path: str) -> Graph:
    """Read the graph and bring it into ``form``.

    Raises `ModelFormatError` for a broken file or one that is no causal language model,
    `UnsupportedFeatureError` where the engine has no paged form of it.
    """
    model = read(core, files.xml, path)
    _check_causal(model, path)
    n_params, n_layer = count_params(model), len(model.get_sinks()) // 2
    if form == RECURRENT:
        n_layer = whole(files.config, "num_hidden_layers") or n_layer
    inv_freq = _inv_freq(model, files)
    if form == "paged":
        n_windows = _n_sliding(model, files.config)
        _to_paged(model)
        _check_windows(model, n_windows)
    head = _head_of(model, path)
    _add_row_inputs(model, head, axis=0 if form == "paged" else 1)
    shape = Shape(
        n_vocab=model.output("logits").partial_shape[2].get_length(),
        n_embd=_width(head),
        n_layer=n_layer,
        n_params=n_params,
    )
    return Graph(model=model, form=form, shape=shape, inv_freq=inv_freq, config=files.config)


def read(core: Any, xml: str, path: str) -> Any:
    """Return the graph of a file. Raises `ModelFormatError`."""
    try:
        with memory_errors(f"the model {xml}"):
            return core.read_model(xml)
    except RuntimeError as error:
        raise ModelFormatError(
            f"{xml} cannot be read: {first_lines(error)}; export or copy the model again",
            path=path,
        ) from error


def names(ports: Any) -> set[str]:
    """Return all names of inputs or outputs."""
    return {name for port in ports for name in port.get_names()}


def _check_causal(model: Any, path: str) -> None:
    inputs, outputs = names(model.inputs), names(model.outputs)
    causal = inputs >= _CAUSAL_INPUTS and "logits" in outputs and model.get_sinks()
    if causal and model.output("logits").partial_shape.rank.get_length() == _LOGITS_RANK:
        return
    raise unknown_kind(model, path)


def unknown_kind(model: Any, path: str) -> ModelFormatError:
    """Return the error for a graph of a kind that is not known here."""
    inputs, outputs = sorted(names(model.inputs)), sorted(names(model.outputs))
    return ModelFormatError(
        f"{path} is neither a causal language model with a KV cache nor an encoder (inputs "
        f"{inputs}, outputs {outputs}); export it with the task text-generation-with-past, or an "
        "encoder with feature-extraction",
        path=path,
    )


def count_params(model: Any) -> int:
    """Count the elements of the weights; what computes shapes and indices is left out.

    So are columns of numbers: rotary frequencies, the scales and zero points of compressed weights.
    """
    shapes = (
        node.get_output_shape(0)
        for node in model.get_ordered_ops()
        if node.get_type_name() == "Constant"
        and node.get_element_type().to_string() not in {"i64", "i32", "boolean"}
    )
    return sum(math.prod(shape) for shape in shapes if len(shape) and shape[-1] > 1)


# -- the paged form ----------------------------------------------------------------------------


def _to_paged(model: Any) -> None:
    try:
        from openvino._offline_transformations import paged_attention_transformation  # noqa: PLC0415  (no public name: other versions may lack it)

        paged_attention_transformation(model)
    except (ImportError, RuntimeError) as error:
        raise UnsupportedFeatureError(
            f"the paged form of this model cannot be made: {first_lines(error)}; use {_STATEFUL}",
            feature="form",
            backend=BACKEND,
        ) from error


def _n_sliding(model: Any, config: Mapping[str, Any]) -> int:
    """Return how many layers look back over a window only: by the config, or else by their masks.

    A config may state a window that the graph does not have.
    """
    stated, width = n_sliding(config), sliding_window(config)
    if stated is not None or width is None:
        return stated or 0
    masks = [n.input_value(_MASK).get_node() for n in model.get_ordered_ops() if _takes_a_mask(n)]
    return sum(_is_made_with(mask, {width - 1, width, width + 1}) for mask in masks)


def _is_made_with(mask: Any, numbers: set[int]) -> bool:
    """Whether one of ``numbers``, or its negative, takes part in a mask."""
    return any(
        node.get_type_name() == "Constant"
        and node.get_element_type().is_integral_number()
        and node.data.size == 1
        and abs(int(node.data.reshape(-1)[0])) in numbers
        for node in _before(mask, ends={"ShapeOf"})
    )


def _check_windows(model: Any, n_windows: int) -> None:
    """Refuse a paged form that reads all tokens where a window was: the engine knows few masks.

    Raises `UnsupportedFeatureError`.
    """
    layers = [n for n in model.get_ordered_ops() if n.get_type_name() == _PAGED_ATTENTION]
    windows = [layer.input_value(_WINDOW).get_node() for layer in layers]
    n_kept = sum(w.get_type_name() != "Constant" or bool(w.data.any()) for w in windows)
    if n_kept < n_windows:
        raise UnsupportedFeatureError(
            f"the paged form of this model cannot be made: of {n_windows} layers with a sliding "
            f"window the engine keeps {n_kept}; use {_STATEFUL}",
            feature="form",
            backend=BACKEND,
        )


# -- more inputs and outputs -------------------------------------------------------------------


def _head_of(model: Any, path: str) -> Any:
    """Return the node that makes logits of hidden states: the last MatMul."""
    node = model.output("logits").get_node().input_value(0).get_node()
    while node.get_type_name() != "MatMul":
        if not node.inputs():
            raise ModelFormatError(f"{path} has no output layer that is known here", path=path)
        node = node.input_value(0).get_node()
    return node


def _width(head: Any) -> int:
    width: int = head.input_value(0).get_partial_shape()[2].get_length()
    return width


def _add_row_inputs(model: Any, head: Any, axis: int) -> None:
    """Let ``out_rows`` choose the rows of logits, and ``hidden_rows`` those of a new output."""
    hidden = head.input_value(0)
    out_rows, rows = (_row_input(name) for name in ("out_rows", "hidden_rows"))
    at = op.constant(axis, dtype=np.int64)
    head.input(0).replace_source_output(op.gather(hidden, out_rows, at).output(0))
    taken = _times_one(op.gather(hidden, rows, at))
    taken.output(0).set_names({"hidden"})
    model.add_parameters([out_rows, rows])
    model.add_results([op.result(taken.output(0))])
    model.validate_nodes_and_infer_types()


def _times_one(values: Any) -> Any:
    """Return ``values`` as a product of theirs, exactly what they are.

    In 16-bit arithmetic the engine keeps all that leads to an output in float32 back to the last
    product. With hidden states as an output that were the sums of all layers.
    """
    last = op.constant([-1], dtype=np.int64)
    column = op.unsqueeze(values, last)
    one = op.constant(np.ones((1, 1), dtype=np.float32))
    return op.squeeze(op.matmul(column, one, False, False), last)


def _row_input(name: str) -> Any:
    parameter = op.parameter([-1], np.int64, name=name)
    parameter.output(0).set_names({name})
    return parameter


# -- rotary frequencies ------------------------------------------------------------------------


def _inv_freq(model: Any, files: ModelFiles) -> Floats | None:
    """Return the frequencies that all layers share, in float32 in the graph too.

    Some exports round them to float16, an error that grows with the position; they are computed
    anew from the config then.
    """
    sources = _frequency_constants(model)
    if len(sources) != 1:
        return None
    constant = next(iter(sources.values()))
    stored: Floats = constant.data.reshape(-1).astype(np.float32)
    if constant.get_element_type().to_string() != "f16":
        return stored
    exact = rope.frequencies(files.config, len(stored))
    if exact is None or not np.allclose(exact, stored, rtol=_F16_RELATIVE_ERROR, atol=1e-7):
        logger.warning("%s: rotary frequencies are rounded to float16", files.xml)
        return stored
    return _replace(constant, exact)


def with_frequencies(graph: Graph, wanted: Rope) -> Graph:
    """Return a copy of ``graph`` that turns queries and keys by other frequencies.

    Raises `UnsupportedFeatureError` where the graph's own are not known.
    """
    model = graph.model.clone()
    sources = list(_frequency_constants(model).values())
    if graph.inv_freq is None or len(sources) != 1:
        hint = "its graph has no rotary frequencies that are one constant; leave it out"
        raise UnsupportedFeatureError(feature=wanted.named, backend=BACKEND, hint=hint)
    values = _replace(sources[0], wanted.frequencies(len(graph.inv_freq)))
    if wanted.magnitude != 1:
        for node in model.get_ordered_ops():
            if node.get_type_name() in {"Cos", "Sin"}:
                users = node.output(0).get_target_inputs()
                factor = op.constant(np.float32(wanted.magnitude))
                product = op.multiply(node, factor).output(0)
                for user in users:
                    user.replace_source_output(product)
    return replace(graph, model=model, inv_freq=values)


def without_causality(graph: Graph) -> Graph:
    """Return a copy of a stateful ``graph`` in which each token reads all that is held.

    Raises `UnsupportedFeatureError` where attention is no operation with a mask.
    """
    model = graph.model.clone()
    found = [n for n in model.get_ordered_ops() if _takes_a_mask(n)]
    if len(found) != graph.shape.n_layer:
        hint = "attention in its graph takes no mask; leave it out"
        raise UnsupportedFeatureError(feature="attention_type", backend=BACKEND, hint=hint)
    held = op.convert(model.input("attention_mask"), "f32")
    left_out = op.multiply(op.subtract(held, np.float32(1)), np.float32(_FAR))  # 0, or far below
    mask = op.unsqueeze(left_out, op.constant([1, 2], dtype=np.int64)).output(0)
    for node in found:
        node.input(_MASK).replace_source_output(mask)
    return replace(graph, model=model)


def _takes_a_mask(node: Any) -> bool:
    return (
        node.get_type_name() == _ATTENTION
        and not node.get_attributes()["causal"]
        and len(node.inputs()) > _MASK
    )


def _is_turned(keys: Any) -> bool:
    """Whether a cosine stands between the product that makes ``keys`` and them."""
    return any(n.get_type_name() == "Cos" for n in _before(keys.get_node(), ends={"MatMul", "Cos"}))


def _before(node: Any, *, ends: set[str]) -> Iterator[Any]:
    """Give a node and all that lead to it, as far as nodes of the types ``ends``."""
    waiting, seen = [node], set[str]()
    while waiting:
        found = waiting.pop()
        if found.get_friendly_name() not in seen:
            seen.add(found.get_friendly_name())
            yield found
            if found.get_type_name() not in ends:
                waiting += [value.get_node() for value in found.input_values()]


def _frequency_constants(model: Any) -> dict[str, Any]:
    """Find the constants that are multiplied with positions on the way to a cosine."""
    found = {}
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Cos":
            constant = _constant_before(node)
            if constant is not None:
                found[constant.get_friendly_name()] = constant
    return found


def _constant_before(node: Any) -> Any:
    """Walk back from a cosine over its layout changes to the product, and return its constant."""
    while node.get_type_name() in {"Cos", "Concat", "Transpose", "Convert", "Unsqueeze", "Reshape"}:
        node = node.input_value(0).get_node()
    if node.get_type_name() not in {"MatMul", "Multiply"}:
        return None
    sources = (_through_converts(value.get_node()) for value in node.input_values())
    return next((s for s in sources if s.get_type_name() == "Constant"), None)


def _through_converts(node: Any) -> Any:
    while node.get_type_name() in {"Convert", "Broadcast", "Unsqueeze"}:
        node = node.input_value(0).get_node()
    return node


def _replace(constant: Any, values: Any) -> Floats:
    """Put ``values`` where the constant and its conversion were; return them in float32."""
    rounded: Floats = values.astype(np.float32)
    fresh = op.constant(rounded.reshape(constant.get_output_shape(0))).output(0)
    for target in constant.output(0).get_target_inputs():
        user = target.get_node()
        if user.get_type_name() == "Convert":
            for port in user.output(0).get_target_inputs():
                port.replace_source_output(fresh)
        else:
            target.replace_source_output(fresh)
    return rounded
