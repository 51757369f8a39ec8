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
from infercore_openvino import rope, sight
from infercore_openvino.engine import BACKEND, first_lines, logger, memory_errors
from infercore_openvino.facts import n_ctx_train, sliding_window
from infercore_openvino.facts import n_layer as stated_n_layer
from infercore_openvino.sight import MASK, PAGED_ATTENTION, STATEFUL, before, takes_a_mask

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infercore_openvino.files import ModelFiles
    from infercore_openvino.rope import Floats, Rope

RECURRENT = "recurrent"
_CAUSAL_INPUTS = {"input_ids", "attention_mask", "beam_idx"}
_POSITIONS = "position_ids"
_LOGITS_RANK = 3
_FAR = 1e9
_KEY, _STEP = 1, 3
_LONG = 8192
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
    ``config.json``. ``counts_slots``: attention looks over a window, or by distance, of which holes
    would be a part, or may do so.
    """

    model: Any
    form: str
    shape: Shape
    inv_freq: Floats | None
    config: Mapping[str, Any]
    counts_slots: bool = False

    @property
    def turns_keys(self) -> bool:
        """Whether each layer of a paged graph turns its keys: some models leave layers out."""
        layers = [n for n in self.model.get_ordered_ops() if n.get_type_name() == PAGED_ATTENTION]
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
        n_layer = stated_n_layer(files.config) or n_layer
    inv_freq = _inv_freq(model, files)
    sights = None if form == RECURRENT else sight.of_layers(core, model, _far(files.config))
    if form == "paged":
        _to_paged(model)
        sight.check_kept(model, sights, has_window=bool(sliding_window(files.config)))
    head = _head_of(model, path)
    _add_row_inputs(model, head, axis=0 if form == "paged" else 1)
    shape = Shape(
        n_vocab=model.output("logits").partial_shape[2].get_length(),
        n_embd=_width(head),
        n_layer=n_layer,
        n_params=n_params,
    )
    return Graph(
        model=model,
        form=form,
        shape=shape,
        inv_freq=inv_freq,
        config=files.config,
        counts_slots=(
            sights is None
            or len(sights) < len(files.keys) // 2
            or any(s.is_limited or s.is_biased for s in sights)
        ),
    )


def _far(config: Mapping[str, Any]) -> int:
    """Return more tokens than any window of a model is wide."""
    return max(n_ctx_train(config) or _LONG, 2 * (sliding_window(config) or 0))


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
    known = {*_CAUSAL_INPUTS, _POSITIONS}
    causal = inputs >= _CAUSAL_INPUTS and "logits" in outputs and model.get_sinks()
    if not causal or model.output("logits").partial_shape.rank.get_length() != _LOGITS_RANK:
        raise unknown_kind(model, path)
    unknown = [port.get_any_name() for port in model.inputs if not port.get_names() & known]
    if unknown:
        raise ModelFormatError(
            f"{path} wants more than tokens, a mask and positions: {', '.join(unknown)}", path=path
        )


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
            f"the paged form of this model cannot be made: {first_lines(error)}; use {STATEFUL}",
            feature="form",
            backend=BACKEND,
        ) from error


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

    Raises `UnsupportedFeatureError` where attention is no operation with a mask, or where its mask
    says more than what is held.
    """
    if graph.counts_slots:
        hint = "its mask has windows or a bias too, or may have; leave it out"
        raise UnsupportedFeatureError(feature="attention_type", backend=BACKEND, hint=hint)
    model = graph.model.clone()
    found = [n for n in model.get_ordered_ops() if takes_a_mask(n)]
    if len(found) != graph.shape.n_layer:
        hint = "attention in its graph takes no mask; leave it out"
        raise UnsupportedFeatureError(feature="attention_type", backend=BACKEND, hint=hint)
    held = op.convert(model.input("attention_mask"), "f32")
    left_out = op.multiply(op.subtract(held, np.float32(1)), np.float32(_FAR))  # 0, or far below
    mask = op.unsqueeze(left_out, op.constant([1, 2], dtype=np.int64)).output(0)
    for node in found:
        node.input(MASK).replace_source_output(mask)
    return replace(graph, model=model)


def _is_turned(keys: Any) -> bool:
    """Whether a cosine stands between the product that makes ``keys`` and them.

    Not where it turns neighbours in place of halves, as `rope.rotate` does.
    """
    found = list(before(keys.get_node(), ends={"MatMul", "Cos"}))
    return any(n.get_type_name() == "Cos" for n in found) and not any(
        map(_takes_each_second, found)
    )


def _takes_each_second(node: Any) -> bool:
    if node.get_type_name() != "Slice":
        return False
    step = node.input_value(_STEP).get_node()
    return step.get_type_name() == "Constant" and bool((step.data > 1).any())


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
