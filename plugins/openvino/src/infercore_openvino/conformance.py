"""The rigs that the conformance suite tries this backend with, on models of the pack.

The storyteller shows all that both forms of its graph can do; ``recurrent`` cannot take tokens
back.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import infercore
from infercore.conformance import Observation, Rig
from infercore.testing import engine_of
from infercore_openvino.files import MODEL_XML

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]

BACKEND = "openvino"
MODEL, FORMAT, ADAPTER = "storyteller", "openvino", "storyteller-lora"
TOLERANCE = 5e-3
"""Float32 weights and cache."""

_EXACT = {"precision": "accurate", "flash_attn": "off", "type_k": "f32", "type_v": "f32"}

# What the rigs must bring and declare: lost, it fails the run and is not refused in silence.
_REQUIRED = (
    "oracle", "observe", "encoder", "kv_remove_any", "state", "sequence_state", "logits_all",
    "embeddings", "chat_template", "plan_memory", "adapter", "lora",
    # options and calls that are honoured
    "n_batch", "n_ubatch", "n_threads", "rope_freq_base", "rope_freq_scale", "yarn", "precision",
    "attention_type", "pooling_type", "f16", "swa_full", "adapters", "decode_vectors",
    "set_control_vector", "warmup", "abort",
)  # fmt: skip
_RECURRENT = (
    "observe", "kv_copy", "multi_sequence", "state", "sequence_state", "logits_all", "embeddings",
    "plan_memory", "live_threads", "n_batch", "n_ubatch", "n_seq_max",
    "kv_unified", "n_threads", "precision", "pooling_type", "swa_full", "decode_vectors", "warmup",
    "abort",
)  # fmt: skip
_OF_BLOCKS = (
    "kv_copy_any", "kv_shift", "kv_divide", "multi_sequence", "n_seq_max", "kv_unified",
)  # fmt: skip


_WRONG_OPTIONS: tuple[dict[str, Any], ...] = (
    {"num_streams": 0}, {"num_streams": 65}, {"dynamic_quantization_group_size": 2**20 + 1},
    {"form": "blocks"}, {"inference_precision": "f64"}, {"enable_cpu_pinning": 1},
    {"cache_dir": ""}, {"cache_dir": "a\0b"}, {"cache_dir": 5},
    {"inference_precision": "f16", "precision": "accurate"},
    {"dynamic_quantization_group_size": 32, "precision": "accurate"},
)  # fmt: skip


_OWN_OPTIONS: tuple[tuple[dict[str, Any], Callable[[Any], bool]], ...] = (
    ({"num_streams": 2}, lambda c: c.effective["num_streams"] == 2),  # noqa: PLR2004
    ({"num_streams": 64}, lambda c: c.effective["num_streams"] > 0),  # one a core at most
    *(
        (
            {"dynamic_quantization_group_size": size},
            lambda c: c.effective["dynamic_quantization_group_size"] == 0,
        )
        for size in (0, 2**20)  # none of its weights is compressed
    ),
    ({"enable_cpu_pinning": False}, lambda c: _property(c, "ENABLE_CPU_PINNING") is False),
    ({"enable_hyper_threading": False}, lambda c: _property(c, "ENABLE_HYPER_THREADING") is False),
)


def _property(context: Any, name: str) -> Any:
    return context.native_handle.get_compiled_model().get_property(name)


def rig() -> Rig:
    """Return the rig. Raises `ModelNotFoundError` without the model pack."""
    rig = _rig(observe=observe, **_beside("gguf-f32"))
    rig.require = (*_REQUIRED, *_OF_BLOCKS)
    rig.own_options = _OWN_OPTIONS
    rig.wrong_options = _WRONG_OPTIONS
    rig.wrong_files = _WRONG_FILES
    rig.ranker = a_ranker
    rig.narrow = in_codes
    rig.others = (
        a_decoder_whose_last_layer_has_no_positions,
        a_decoder_that_turns_neighbours,
        a_decoder_that_sums_up_too,
        a_decoder_that_slides,
        a_decoder_whose_mask_the_engine_does_not_know,
    )
    return rig


def stateful_rig() -> Rig:
    """Return the rig of the form that is used where a graph cannot be made paged."""
    rig = _rig(
        variant="stateful",
        observe=count_evaluated,
        exact={**_EXACT, "backend_options": {"form": "stateful"}},
        **_beside("hf"),
    )
    rig.require = (*_REQUIRED, "set_causal_attention")
    rig.narrow = in_half_precision
    rig.others = (a_decoder_that_slides,)
    rig.known = {"MEM-8": "engine: OpenVINO leaves a thread behind for each model it compiles"}
    return rig


def recurrent_rig() -> Rig:
    """Return the rig of a model whose state has no parts that could be removed."""
    rig = _rig("recurrent", variant="recurrent", observe=count_evaluated)
    rig.require = _RECURRENT
    rig.wrong_options = ({"form": "stateful"},)
    return rig


def _beside(adapter_format: str) -> dict[str, Any]:
    """What goes with the storyteller: its oracle, an adapter, an encoder."""
    return {
        "model_name": MODEL,
        "adapter": pack_path(ADAPTER, adapter_format),
        "adapter_name": ADAPTER,
        "encoder": pack_path("encoder"),
        "encoder_name": "encoder",
    }


def _rig(name: str = MODEL, **fields: Any) -> Rig:
    path = pack_path(name)
    given: dict[str, Any] = {
        "backend": BACKEND,
        "engine": "openvino",
        "open_model": lambda: infercore.load_model(path, backend=BACKEND),
        "path": path,
        "open_path": lambda where: infercore.load_model(where, backend=BACKEND),
        "tolerance": TOLERANCE,
        "exact": _EXACT,
        "suite_version": "1.2",
    }
    return Rig(**{**given, **fields})


def pack_path(name: str, form: str = FORMAT) -> str:
    """Return where a model of the pack lies. Raises `ModelNotFoundError` without the pack."""
    try:
        import infercore_models  # noqa: PLC0415  (a distribution of its own)
    except ImportError as error:
        raise infercore.ModelNotFoundError(
            "the model pack (infercore-models) is not installed; it comes from the same place "
            "as infercore",
            path=name,
        ) from error
    return str(infercore_models.path(name, form))


# -- narrower weights ------------------------------------------------------------------------------


def in_half_precision(folder: str) -> Callable[[Floats], Floats]:
    """Write the storyteller into ``folder`` in half precision; return what weights are in it.

    As other exporters do it: its nodes have no names, attention is made of products, and the table
    scales its own rows, as Gemma's does.
    """
    model = _graph()
    _scale_table(model)
    _spell_out_attention(model)
    for i, node in enumerate(model.get_ordered_ops()):
        node.set_friendly_name(f"node {i}")
    _write(model, folder, in_half=True)
    _edit(folder, "config.json", model_type="gemma3_text")
    return lambda weights: weights.astype(np.float16).astype(np.float32)


def _scale_table(model: Any) -> None:
    """Look up half of each row, in half precision, and double it."""
    from openvino import opset13 as op  # noqa: PLC0415  (imports the engine)

    lookup = _named(model, "embed_tokens/aten::embedding/Gather")
    users = list(lookup.output(0).get_target_inputs())
    half = op.convert(op.multiply(lookup.input_value(0), np.float32(0.5)), "f16")
    lookup.input(0).replace_source_output(half.output(0))
    doubled = op.multiply(op.convert(lookup, "f32"), np.float32(2))
    for user in users:
        user.replace_source_output(doubled.output(0))
    model.validate_nodes_and_infer_types()


def _spell_out_attention(model: Any) -> None:
    """Put products and a softmax in the place of each operation of attention."""
    from openvino import opset13 as op  # noqa: PLC0415  (imports the engine)

    for node in model.get_ordered_ops():
        if node.get_type_name() == "ScaledDotProductAttention":
            q, k, v, mask = (node.input_value(i) for i in range(4))
            scale = np.float32(q.get_partial_shape()[3].get_length() ** -0.5)
            scores = op.multiply(op.matmul(q, k, False, True), scale)
            shares = op.softmax(op.add(scores, mask), -1)
            read = op.matmul(shares, v, False, False)
            for user in node.output(0).get_target_inputs():
                user.replace_source_output(read.output(0))


def _named(model: Any, name: str) -> Any:
    return next(n for n in model.get_ordered_ops() if n.get_friendly_name().endswith(name))


def in_codes(folder: str) -> Callable[[Floats], Floats]:
    """Write the storyteller into ``folder`` in 8 bits, as NNCF does: a scale and zero for each row.

    Returns what weights are in it; those that are no matrix stay as they are.
    """
    from openvino import opset13 as op  # noqa: PLC0415  (imports the engine)

    model = _graph()
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Constant" and node.get_friendly_name().endswith(".weight"):
            users = list(node.output(0).get_target_inputs())
            codes, zeros, scales = _coded(np.array(node.data))
            plain = op.subtract(*(op.convert(op.constant(n), "f32") for n in (codes, zeros)))
            for user in users:
                user.replace_source_output(op.multiply(plain, op.constant(scales)).output(0))
    _write(model, folder, in_half=False)
    return _decoded


def _coded(weights: Floats) -> tuple[Any, Any, Any]:
    """Return codes [rows, columns], zeros and scales [rows, 1] of weights."""
    low, high = (ends(weights, axis=1, keepdims=True) for ends in (np.min, np.max))
    scales = ((high - low) / np.float32(255)).astype(np.float32)
    zeros = np.rint(-low / scales).astype(np.uint8)
    codes = np.clip(np.rint(weights / scales) + zeros, 0, 255).astype(np.uint8)
    return codes, zeros, scales


def _decoded(weights: Floats) -> Floats:
    if weights.ndim == 1:
        return weights
    codes, zeros, scales = _coded(weights)
    plain: Floats = (codes.astype(np.float32) - zeros.astype(np.float32)) * scales
    return plain


def _graph(name: str = MODEL) -> Any:
    from infercore_openvino.engine import shared_core  # noqa: PLC0415  (imports the engine)

    return shared_core().read_model(os.path.join(pack_path(name), MODEL_XML))


def _write(model: Any, folder: str, *, in_half: bool, name: str = MODEL) -> None:
    """Write ``model`` with what lies beside the graph of that name."""
    import openvino as ov  # noqa: PLC0415

    left = shutil.ignore_patterns("openvino_*")
    shutil.copytree(pack_path(name), folder, ignore=left, dirs_exist_ok=True)
    ov.save_model(model, os.path.join(folder, MODEL_XML), compress_to_fp16=in_half)


def _edit(folder: str, name: str, **fields: Any) -> None:
    file = Path(folder) / name
    file.chmod(0o600)
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), **fields}), "utf-8")


def a_ranker(folder: str) -> Callable[[Sequence[int], Sequence[int]], float]:
    """Write the encoder with a head into ``folder``; return what the graph gives by itself."""
    from openvino import opset13 as op  # noqa: PLC0415

    from infercore_openvino.engine import shared_core  # noqa: PLC0415  (imports the engine)

    model, numbers = _graph("encoder"), np.random.default_rng(5)
    width = model.output(0).get_partial_shape()[2].get_length()
    head = op.constant(numbers.standard_normal((1, width)).astype(np.float32))
    _put_out(model, lambda rows: op.matmul(_first(rows), head, False, True), {"logits"})
    _take_short_numbers(model)
    model.validate_nodes_and_infer_types()
    _write(model, folder, in_half=False, name="encoder")
    _edit(folder, "config.json", architectures=["BertForSequenceClassification"])
    compiled = shared_core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def score(ids: Sequence[int], kinds: Sequence[int]) -> float:
        given = {"input_ids": ids, "attention_mask": [1] * len(ids), "token_type_ids": kinds}
        known = {name for port in compiled.inputs for name in port.get_names()}
        arrays = {n: np.array([v], dtype=np.int32) for n, v in given.items() if n in known}
        return float(compiled(arrays)["logits"][0, 0])

    return score


def _take_short_numbers(model: Any) -> None:
    """Let its inputs be of 32 bits, as some exporters write them."""
    import openvino as ov  # noqa: PLC0415
    from openvino import opset13 as op  # noqa: PLC0415  (imports the engine)

    for port in model.inputs:
        parameter, users = port.get_node(), list(port.get_target_inputs())
        parameter.set_element_type(ov.Type.i32)
        for user in users:
            user.replace_source_output(op.convert(parameter, "i64").output(0))


def _first(rows: Any) -> Any:
    from openvino import opset13 as op  # noqa: PLC0415  (imports the engine)

    return op.gather(rows, np.int64(0), np.int64(1))


# -- files that are no models ----------------------------------------------------------------------


def _changed(name: str) -> Callable[[Callable[[Any], None]], Callable[[str], str]]:
    """Make what changes the graph of that name a writer of it, changed."""

    def of(change: Callable[[Any], None]) -> Callable[[str], str]:
        @functools.wraps(change)
        def write(folder: str) -> str:
            model = _graph(name)
            change(model)
            model.validate_nodes_and_infer_types()
            _write(model, folder, in_half=False, name=name)
            return folder

        return write

    return of


def _beside_it(name: str, file: str, content: bytes | None) -> Callable[[str], str]:
    """Return a writer of a model with another file beside it; None for a folder of that name."""

    def write(folder: str) -> str:
        shutil.copytree(pack_path(name), folder, dirs_exist_ok=True)
        path = Path(folder) / file
        path.unlink(missing_ok=True)
        path.mkdir() if content is None else path.write_bytes(content)
        return folder

    write.__name__ = f"{name} with {file} of {content!r}"
    return write


@_changed("encoder")
def an_encoder_of_texts_of_one_length(model: Any) -> None:
    model.reshape({port: [-1, 8] for port in model.inputs})


def _take_pixels(model: Any) -> None:
    from openvino import opset13 as op  # noqa: PLC0415  (imports the engine)

    more = op.parameter([-1, -1], np.int64, name="pixels")
    more.output(0).set_names({"pixels"})
    model.add_parameters([more])


@_changed("encoder")
def an_encoder_of_more_than_tokens(model: Any) -> None:
    _take_pixels(model)


@_changed(MODEL)
def a_decoder_of_more_than_tokens(model: Any) -> None:
    _take_pixels(model)


@_changed("encoder")
def an_encoder_without_hidden_states(model: Any) -> None:
    model.output(0).get_tensor().set_names({"something"})


@_changed("encoder")
def an_encoder_of_one_vector_a_text(model: Any) -> None:
    from openvino import opset13 as op  # noqa: PLC0415  (imports the engine)

    _put_out(model, lambda rows: op.reduce_mean(rows, np.array([1], np.int64), False))


@_changed("encoder")
def an_encoder_without_a_table(model: Any) -> None:
    from openvino import opset13 as op  # noqa: PLC0415  (imports the engine)

    ids = model.input("input_ids")
    users = list(ids.get_target_inputs())
    moved = op.add(ids, np.int64(0)).output(0)
    for user in users:
        user.replace_source_output(moved)


@_changed(MODEL)
def a_decoder_without_beams(model: Any) -> None:
    model.input("beam_idx").get_tensor().set_names({"beams"})


@_changed(MODEL)
def a_decoder_of_flat_logits(model: Any) -> None:
    from openvino import opset13 as op  # noqa: PLC0415  (imports the engine)

    _put_out(model, lambda rows: op.reshape(rows, np.array([-1, 1024], np.int64), False))


@_changed(MODEL)
def a_decoder_without_an_output_layer(model: Any) -> None:
    from openvino import opset13 as op  # noqa: PLC0415  (imports the engine)

    _put_out(model, lambda rows: op.add(np.zeros((1, 1, 1), np.float32), rows))


def _put_out(model: Any, make: Callable[[Any], Any], names: set[str] | None = None) -> None:
    """Let the first output be what ``make`` makes of it, under its name or other ``names``."""
    port = model.output(0)
    result, names = port.get_node(), names or port.get_names()
    source = result.input_value(0)
    made = make(source).output(0)
    source.get_tensor().set_names(set())
    made.get_tensor().set_names(names)
    port.get_tensor().set_names(names)
    result.input(0).replace_source_output(made)


_WRONG_FILES = (
    an_encoder_of_texts_of_one_length, an_encoder_of_more_than_tokens,
    an_encoder_without_hidden_states, an_encoder_of_one_vector_a_text, an_encoder_without_a_table,
    a_decoder_without_beams, a_decoder_of_flat_logits, a_decoder_without_an_output_layer,
    a_decoder_of_more_than_tokens,
    _beside_it("encoder", "1_Pooling/config.json", b"[]"),
    _beside_it("encoder", "1_Pooling/config.json", b"{"),
    _beside_it("encoder", "tokenizer_config.json", None),
    _beside_it(MODEL, "config.json", b"[" * 100_000),
    _beside_it(MODEL, "tokenizer.json", None),
    _beside_it(MODEL, "chat_template.jinja", None),
)  # fmt: skip


# -- models that are built otherwise ---------------------------------------------------------------


@_changed(MODEL)
def a_decoder_whose_last_layer_has_no_positions(model: Any) -> None:
    rotated = "layers.3.self_attn/aten::add/Add"
    for name in (rotated, f"{rotated}_1"):
        node = _named(model, name)
        plain = node.input_value(0).get_node().input_value(0)
        for user in node.output(0).get_target_inputs():
            user.replace_source_output(plain)


@_changed(MODEL)
def a_decoder_that_turns_neighbours(model: Any) -> None:
    """Let rope turn neighbours in place of halves, as GLM's does."""
    from openvino import opset13 as op  # noqa: PLC0415  (imports the engine)

    def number(n: Any) -> Any:
        return op.constant(n, dtype=np.int64)

    rotated = "self_attn/aten::add/Add"
    for node in model.get_ordered_ops():
        if not node.get_friendly_name().endswith((rotated, f"{rotated}_1")):
            continue
        users = node.output(0).get_target_inputs()
        plain = node.input_value(0).get_node().input_value(0)
        n_heads, size = (plain.get_partial_shape()[i].get_length() for i in (1, 3))
        takers = plain.get_target_inputs()
        each_second = [
            op.slice(plain, number([i]), number([2**62]), number([2]), number([3])) for i in (0, 1)
        ]
        for taker in takers:
            taker.replace_source_output(op.concat(each_second, 3).output(0))
        pairs = op.reshape(node, number([0, n_heads, -1, 2, size // 2]), True)
        pairs = op.transpose(pairs, number([0, 1, 2, 4, 3]))
        back = op.reshape(pairs, number([0, n_heads, -1, size]), True).output(0)
        for user in users:
            user.replace_source_output(back)


@_changed(MODEL)
def a_decoder_that_sums_up_too(model: Any) -> None:
    """Add to what goes into the output layer a share of the sum of those before, in a state."""
    import openvino as ov  # noqa: PLC0415  (imports the engine)
    from openvino import opset13 as op  # noqa: PLC0415
    from openvino.op import assign, read_value, util  # noqa: PLC0415

    head = model.output("logits").get_node().input_value(0).get_node()
    hidden = head.input_value(0)
    n_embd = hidden.get_partial_shape()[2].get_length()
    about = util.VariableInfo()
    about.variable_id = "cache_params.past.ssm.0cache_params.present.ssm.0"
    about.data_shape, about.data_type = ov.PartialShape([-1, n_embd]), ov.Type.f32
    variable = util.Variable(about)
    first, second = (op.constant(n, dtype=np.int64) for n in (0, 1))
    n_texts = op.unsqueeze(op.gather(op.shape_of(model.input("input_ids")), first, first), first)
    shape = op.concat([n_texts, op.constant([n_embd], dtype=np.int64)], 0)
    read = read_value(op.broadcast(np.float32(0), shape), variable)
    kept = op.unsqueeze(op.gather(read, model.input("beam_idx"), first), second)
    sums = op.add(op.cum_sum(hidden, second), kept)
    last = op.gather(sums, op.constant(-1, dtype=np.int64), second)
    mixed = op.add(hidden, op.multiply(sums, np.float32(0.1)))
    head.input(0).replace_source_output(mixed.output(0))
    model.add_variables([variable])
    model.add_sinks([assign(last, variable)])


def a_decoder_that_slides(folder: str) -> str:
    """Let two of four layers see a window, as exporters write the mask of such layers."""
    from openvino import opset13 as op  # noqa: PLC0415  (imports the engine)

    def in_form(seen: Any, mask: Any) -> Any:
        shape = mask.input_value(0).get_node().input_value(1)
        whole = op.select(
            op.broadcast(seen, shape, "bidirectional"), mask.input_value(1), mask.input_value(2)
        )
        return op.slice(whole, *(op.constant([n], dtype=np.int64) for n in (0, 2**62, 1, 3)))

    return _sliding(folder, in_form)


def a_decoder_whose_mask_the_engine_does_not_know(folder: str) -> str:
    """Write the same layers with another mask: the engine's paged attention would see all."""
    from openvino import opset13 as op  # noqa: PLC0415  (imports the engine)

    return _sliding(
        folder, lambda seen, mask: op.select(seen, mask.input_value(1), mask.input_value(2))
    )


def _sliding(folder: str, in_form: Callable[[Any, Any], Any]) -> str:
    from openvino import opset13 as op  # noqa: PLC0415  (imports the engine)

    model, width, layers = _graph(MODEL), 24, (0, 2)
    mask = _named(model, "aten::where/Select")
    causal = _named(model, "aten::le/LessEqual")
    kept = mask.input_value(0).get_node().input_value(0).get_node().input_value(1)
    places, own = causal.input_value(0), causal.input_value(1)
    true, first = op.constant(np.array(True)), op.add(own, op.constant(np.int64(-width)))
    seen = op.bitwise_and(op.bitwise_and(true, op.greater(places, first)), causal)
    changed = in_form(op.bitwise_and(op.bitwise_and(true, seen), kept), mask)
    for i in layers:
        name = f"layers.{i}.self_attn/aten::scaled_dot_product_attention/ScaledDotProductAttention"
        _named(model, name).input(3).replace_source_output(changed.output(0))
    model.validate_nodes_and_infer_types()
    _write(model, folder, in_half=False)
    oracle = os.path.join(folder, "oracle")
    shutil.copytree(pack_path(MODEL, "hf"), oracle)
    for where in (folder, oracle):
        kinds = ["sliding_attention" if i in layers else "full_attention" for i in range(4)]
        _edit(where, "config.json", sliding_window=width, layer_types=kinds)
    return folder


# -- what the engine holds -------------------------------------------------------------------------


def observe(context: Any, seq_id: int) -> Observation:
    """Return what the block tables hold, and how many tokens went into the infer request."""
    inner = engine_of(context)
    return Observation(
        resident=len(inner._tables.positions(seq_id)),  # noqa: SLF001
        evaluated=inner.n_evaluated,
    )


def count_evaluated(context: Any, seq_id: int) -> Observation:
    """Return how many tokens went into the infer request."""
    del seq_id
    return Observation(evaluated=engine_of(context).n_evaluated)
