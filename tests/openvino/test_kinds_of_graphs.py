"""Graphs of mixtures of experts, and of recurrent layers beside attention, as exports have them."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import infercore as ic
import openvino as ov
import pack
from infercore.weight_files import safetensors
from infercore_openvino.conformance import a_decoder_that_turns_neighbours
from openvino import opset13 as op

if TYPE_CHECKING:
    from pathlib import Path

N_EXPERTS, N_CHOSEN, N_LAYER = 4, 2, 4


def number(value: Any) -> Any:
    return op.constant(np.array(value, dtype=np.int64))


def load(path: Path) -> Any:
    return ov.Core().read_model(path / "openvino_model.xml")


def save(model: Any, path: Path, folder: Path) -> Path:
    model.validate_nodes_and_infer_types()
    shutil.copytree(path, folder, ignore=shutil.ignore_patterns("openvino_model.*"))
    ov.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)
    return folder


def product(model: Any, layer: int, name: str) -> Any:
    at = f"__module.model.layers.{layer}.mlp.{name}/"
    (found,) = (
        node
        for node in model.get_ordered_ops()
        if node.get_type_name() == "MatMul" and node.get_friendly_name().startswith(at)
    )
    return found


def routed(model: Any, layer: int, random: np.random.Generator) -> None:
    """Let each token go to two of four experts, each the layer's own MLP: the sum is the same.

    As the loops over experts are exported: of each expert the tokens that chose it are gathered,
    worked out, weighed and added to their places.
    """
    gate, up, down = (product(model, layer, name) for name in ("gate_proj", "up_proj", "down_proj"))
    h, users = gate.input_value(0), list(down.output(0).get_target_inputs())
    flat = op.reshape(h, number([-1, h.get_partial_shape()[2].get_length()]), False)
    router = random.normal(0, 1, (N_EXPERTS, h.get_partial_shape()[2].get_length()))
    scores = op.matmul(flat, op.constant(router.astype(np.float32)), False, True)
    best = op.topk(op.softmax(scores, 1), number(N_CHOSEN), 1, "max", "value")
    total = op.reduce_sum(best.output(0), number([1]), True)
    shares = op.divide(best.output(0), total)
    found = op.multiply(flat, op.constant(np.float32(0)))
    for expert in range(N_EXPERTS):
        chosen = op.equal(best.output(1), op.constant(np.int32(expert)))
        share = op.reduce_sum(op.multiply(op.convert(chosen, "f32"), shares), number([1]), False)
        places = op.squeeze(op.non_zero(op.greater(share, np.float32(0)), "i64"), number(0))
        own = op.gather(flat, places, number(0))
        a = op.swish(op.matmul(own, gate.input_value(1), False, True))
        b = op.matmul(own, up.input_value(1), False, True)
        out = op.matmul(op.multiply(a, b), down.input_value(1), False, True)
        weighed = op.multiply(out, op.unsqueeze(op.gather(share, places, number(0)), number(1)))
        spread = op.broadcast(op.unsqueeze(places, number(1)), op.shape_of(weighed))
        found = op.scatter_elements_update(found, spread, weighed, number(0), "sum", True)
    back = op.reshape(found, op.shape_of(h), False).output(0)
    for user in users:
        user.replace_source_output(back)


@pytest.fixture(scope="module")
def mixed(ov_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model, random = load(ov_path), np.random.default_rng(3)
    for layer in range(N_LAYER):
        routed(model, layer, random)
    folder = save(model, ov_path, tmp_path_factory.mktemp("experts") / "model")
    with ic.load_model(folder, backend="openvino") as loaded:
        yield loaded


def test_experts_in_both_forms(mixed: Any, ov_model: Any, story: list[int], form: str) -> None:
    fields = {**pack.EXACT, "n_ctx": 256, "backend_options": {"form": form}}
    with mixed.new_context(**fields) as context, ov_model.new_context(**fields) as plain:
        assert mixed.capabilities.kv_remove == "any"
        for one in (context, plain):
            one.decode(story[:40])
            one.seq_remove(0, 30)
            one.decode(story[50:60], logits="all")
        assert np.abs(context.logits_all() - plain.logits_all()).max() < 1e-3
        for one in (context, plain):
            one.decode_one(5)
        assert np.abs(context.logits() - plain.logits()).max() < 1e-3


def test_experts_in_a_pool(mixed: Any, ov_model: Any) -> None:
    found = []
    for model in (mixed, ov_model):
        with model.new_pool(**pack.EXACT, n_ctx=128, n_parallel=2) as pool:
            sessions = [pool.open_session() for _ in range(2)]
            found.append([s.generate("Once upon", max_tokens=8, temperature=0) for s in sessions])
    assert found[0] == found[1]


def with_memory(model: Any) -> None:
    """Add to the first layer's output a running sum over its tokens: a state beside attention."""
    name = "__module.model.layers.0/aten::add/Add_1"
    (node,) = (n for n in model.get_ordered_ops() if n.get_friendly_name() == name)
    users = list(node.output(0).get_target_inputs())
    width = node.get_output_partial_shape(0)[2].get_length()
    info = ov.op.util.VariableInfo()
    info.data_shape, info.data_type = ov.PartialShape([-1, 1, width]), ov.Type.f32
    info.variable_id = "cache_params.past.ssm.0cache_params.present.ssm.0"
    variable = ov.op.util.Variable(info)
    first = op.gather(op.shape_of(model.input("input_ids")), number([0]), number(0))
    empty = op.broadcast(np.float32(0), op.concat([first, number([1, width])], 0))
    past = op.gather(op.read_value(empty, variable), model.input("beam_idx"), number(0))
    sums = op.add(op.cumsum(node, number(1)), past)
    last = op.gather(sums, number([-1]), number(1))
    model.add_variables([variable])
    model.add_sinks([op.assign(last, variable)])
    total = op.add(node, op.multiply(op.tanh(sums), np.float32(0.5))).output(0)
    for user in users:
        user.replace_source_output(total)


def test_recurrent_layers_beside_attention(
    ov_path: Path, ov_model: Any, tmp_path: Path, story: list[int]
) -> None:
    model = load(ov_path)
    with_memory(model)
    folder = save(model, ov_path, tmp_path / "model")
    with ic.load_model(folder, backend="openvino") as hybrid:
        assert (hybrid.info.is_recurrent, hybrid.info.is_hybrid) == (False, True)
        assert hybrid.capabilities.kv_remove == "none"
        usual = ov_model.capabilities.kv_types  # with bf16 where the processor computes in it
        assert hybrid.capabilities.kv_types == tuple(kind for kind in usual if kind != "u8")
        assert sorted(hybrid.plan_memory(n_ctx=256).kv_bytes_by_kind) == ["full", "recurrent"]
        rows = []
        for n_batch in (512, 8):
            with hybrid.new_context(**pack.EXACT, n_ctx=256, n_batch=n_batch, n_seq_max=2) as one:
                one.decode(story[:30], logits="all")
                rows.append(one.logits_all().copy())
                one.seq_copy(0, 1)
                saved = one.save_sequence(0)
                one.decode_batch([(7, (0, 1), True), (9, (1,), True)])
                one.load_sequence(0, saved)
                one.decode([7, 9], logits="all")
                rows.append(one.logits_all().copy())
        assert np.abs(rows[0] - rows[2]).max() < 1e-3
        assert np.abs(rows[1] - rows[3]).max() < 1e-3
        with ov_model.new_context(**pack.EXACT, n_ctx=256) as plain:
            plain.decode(story[:30], logits="all")
            assert np.abs(plain.logits_all() - rows[0]).max() > 0.1
        with hybrid.new_session(**pack.EXACT, n_ctx=256) as session:
            session.ensure_prefix("Once upon a time")
            first = [session.generate(t, max_tokens=6, temperature=0) for t in ("The fox", "A dog")]
            again = session.generate("The fox", max_tokens=6, temperature=0)
        assert again == first[0]


def lookup(model: Any) -> Any:
    """Return the node that looks tokens up in the table."""
    return next(
        target.get_node()
        for first in model.input("input_ids").get_target_inputs()
        for target in (first, *first.get_node().output(0).get_target_inputs())
        if target.get_node().get_type_name() == "Gather" and target.get_index() == 1
    )


def put_behind(node: Any, make: Any) -> None:
    users = list(node.output(0).get_target_inputs())
    made = make(node.output(0)).output(0)
    for user in users:
        user.replace_source_output(made)


@pytest.mark.parametrize(("kind", "factor"), [("gemma3_text", 1), ("granite", 0.5)])
def test_rows_stand_behind_the_scale_of_a_table_that_has_one(
    ov_path: Path, tmp_path: Path, kind: str, factor: float
) -> None:
    """Gemma 3's table scales its own rows; other models scale what is given, too."""
    import infercore_models

    model = load(ov_path)
    put_behind(lookup(model), lambda rows: op.multiply(rows, op.constant(np.float32(2))))
    folder = save(model, ov_path, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": kind}))
    hf = infercore_models.path("storyteller", "hf") / "model.safetensors"
    table = 2 * safetensors.read(str(hf))["model.embed_tokens.weight"]
    with (
        ic.load_model(folder, backend="openvino", check_in_child=False) as loaded,
        loaded.new_context(**pack.EXACT, n_ctx=64) as context,
    ):
        context.decode([5, 6, 7])
        expected = context.logits().copy()
        context.clear()
        context.decode_spans([(0, table[[5, 6, 7]] * factor, "last")])
        assert np.abs(context.logits() - expected).max() < context.tolerance


def test_rows_are_refused_where_tokens_look_up_two_tables(ov_path: Path, tmp_path: Path) -> None:
    model = load(ov_path)
    first = lookup(model)
    other = op.gather(first.input_value(0), first.input_value(1), number(0))
    put_behind(first, lambda rows: op.add(rows, op.multiply(other, op.constant(np.float32(2)))))
    folder = save(model, ov_path, tmp_path / "model")
    with (
        ic.load_model(folder, backend="openvino", check_in_child=False) as loaded,
        loaded.new_context(**pack.EXACT, n_ctx=64) as context,
    ):
        rows = np.zeros((2, loaded.info.n_embd), np.float32)
        with pytest.raises(ic.UnsupportedFeatureError, match="no one table"):
            context.decode_spans([(0, rows, "last")])


def test_keys_of_which_neighbours_are_turned_are_not_moved(tmp_path: Path) -> None:
    folder = a_decoder_that_turns_neighbours(str(tmp_path / "model"))
    with ic.load_model(folder, backend="openvino") as other, other.new_context(n_ctx=64) as context:
        assert context.capabilities == other.capabilities
        assert not context.capabilities.kv_shift
