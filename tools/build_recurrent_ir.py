"""Build the pack's `recurrent` model as an OpenVINO IR, from its GGUF file.

The graph keeps its states as exports of optimum-intel do: ``cache_params.past.conv.N``, the last
inputs of a layer's convolution, and ``cache_params.past.ssm.N``, the state of its scan, which is
worked out token by token in a loop. Run: ``python tools/build_recurrent_ir.py``.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import openvino as ov
from openvino import opset13 as op

DATA = Path(__file__).parents[1] / "models" / "src" / "infercore_models" / "data"
SOURCE = DATA / "recurrent" / "recurrent-f32.gguf"
TARGET = DATA / "recurrent" / "openvino"
OF_TEXT = ("tokenizer.json", "tokenizer_config.json")
N_LAYER, EPSILON, TIME = 2, 1e-5, 2


def main() -> None:
    """Write the folder anew."""
    tensors = {t.name: np.array(t.data) for t in gguf.GGUFReader(SOURCE).tensors}
    model = build(tensors)
    shutil.rmtree(TARGET, ignore_errors=True)
    TARGET.mkdir()
    ov.save_model(model, TARGET / "openvino_model.xml", compress_to_fp16=False)
    for name in OF_TEXT:
        shutil.copy(DATA / "storyteller" / "hf" / name, TARGET / name)
    n_vocab, n_embd = tensors["token_embd.weight"].shape
    config = {
        "model_type": "mamba",
        "vocab_size": n_vocab,
        "hidden_size": n_embd,
        "num_hidden_layers": N_LAYER,
        "max_position_embeddings": 1024,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (TARGET / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def build(tensors: dict[str, Any]) -> Any:
    """Return the graph: tokens [n_texts, n_tokens] to logits, and the states of its layers."""
    ids = _input("input_ids", np.int64, -1, -1)
    mask = _input("attention_mask", np.int64, -1, -1)
    beams = _input("beam_idx", np.int32, -1)
    x = op.gather(_constant(tensors["token_embd.weight"]), ids, _number(0))
    sinks: list[Any] = []
    variables: list[Any] = []
    for layer in range(N_LAYER):
        own = {
            name.removeprefix(f"blk.{layer}."): array
            for name, array in tensors.items()
            if name.startswith(f"blk.{layer}.")
        }
        h = _norm(x, own["attn_norm.weight"])
        x = op.add(x, _mixed(h, own, layer, (ids, beams), (sinks, variables)))
    logits = _times(_norm(x, tensors["output_norm.weight"]), tensors["output.weight"])
    logits.output(0).set_names({"logits"})
    return ov.Model([op.result(logits)], sinks, [ids, mask, beams], variables, "mamba")


def _mixed(h: Any, own: dict[str, Any], layer: int, inputs: Any, kept: Any) -> Any:
    """Return what a layer adds: convolution and scan of one half, let through by the other."""
    n_inner, kernel = own["ssm_conv1d.weight"].shape
    n_state = own["ssm_a"].shape[1]
    rank = own["ssm_dt.weight"].shape[1]
    halves = op.split(_times(h, own["ssm_in.weight"]), _number(2), 2)
    turned = op.transpose(halves.output(0), _number([0, 2, 1]))
    conv = _State(f"conv.{layer}", (n_inner, kernel), inputs, kept)
    seen = op.concat([conv.value, turned], TIME)
    conv.keep(_slice(seen, -kernel, None))
    weight = _constant(own["ssm_conv1d.weight"].reshape(n_inner, 1, 1, kernel))
    mixed = op.group_convolution(_slice(seen, 1, None), weight, [1], [0], [0], [1])
    u = op.transpose(
        op.swish(op.add(mixed, _constant(own["ssm_conv1d.bias"].reshape(1, -1, 1)))),
        _number([0, 2, 1]),
    )
    parts = op.variadic_split(
        _times(u, own["ssm_x.weight"]), _number(2), _number([rank, n_state, n_state])
    )
    step = op.softplus(
        op.add(_times(parts.output(0), own["ssm_dt.weight"]), _constant(own["ssm_dt.bias"]))
    )
    ssm = _State(f"ssm.{layer}", (n_inner, n_state), inputs, kept)
    y = _scanned(u, step, (parts.output(1), parts.output(2)), own["ssm_a"], ssm)
    y = op.add(y, op.multiply(u, _constant(own["ssm_d"].reshape(1, 1, -1))))
    return _times(op.multiply(y, op.swish(halves.output(1))), own["ssm_out.weight"])


def _scanned(u: Any, step: Any, read: Any, a: Any, ssm: _State) -> Any:
    """Return [n_texts, n_tokens, n_inner]: what is read of a state that each token changes."""
    n_inner, n_state = a.shape
    now = _parameters(("state", (n_inner, n_state)), ("u", (1, n_inner)), ("step", (1, n_inner)),
                      ("b", (1, n_state)), ("c", (1, n_state)))  # fmt: skip
    wide = op.transpose(now["step"], _number([0, 2, 1]))
    kept = op.multiply(now["state"], op.exp(op.multiply(wide, _constant(a[None]))))
    new = op.multiply(
        op.multiply(wide, op.transpose(now["u"], _number([0, 2, 1]))), now["b"]
    )
    state = op.add(kept, new)
    out = op.matmul(now["c"], state, False, True)
    always = op.constant(np.array([True]))
    body = ov.Model([op.result(always), op.result(state), op.result(out)], list(now.values()), "")
    length = op.gather(op.shape_of(u), _number([1]), _number(0))
    loop = op.loop(op.squeeze(length, _number(0)), op.constant(np.array(True)))
    loop.set_function(body)
    loop.set_special_body_ports([-1, 0])
    loop.set_merged_input(now["state"], ssm.value.output(0), body.results[1].output(0))
    for name, given in (("u", u), ("step", step), ("b", read[0]), ("c", read[1])):
        port = given if isinstance(given, ov.Output) else given.output(0)
        loop.set_sliced_input(now[name], port, 0, 1, 1, -1, 1)
    last = loop.get_iter_value(body.results[1].output(0), -1)
    rows = loop.get_concatenated_slices(body.results[2].output(0), 0, 1, 1, -1, 1)
    ssm.keep(op.multiply(last, op.constant(np.float32(1))))  # a variable takes no bare output
    return rows


class _State:
    """A variable of the graph, in the order of ``beam_idx``."""

    def __init__(self, name: str, shape: tuple[int, int], inputs: Any, kept: Any) -> None:
        ids, beams = inputs
        self._sinks, variables = kept
        kind, layer = name.split(".")
        info = ov.op.util.VariableInfo()
        info.data_shape = ov.PartialShape([-1, *shape])
        info.data_type = ov.Type.f32
        past, present = (f"cache_params.{when}.{kind}.{layer}" for when in ("past", "present"))
        info.variable_id = past + present
        self._variable = ov.op.util.Variable(info)
        variables.append(self._variable)
        n_texts = op.gather(op.shape_of(ids), _number([0]), _number(0))
        size = op.concat([n_texts, _number(list(shape))], 0)
        empty = op.broadcast(op.constant(np.float32(0)), size)
        read = op.read_value(empty, self._variable)
        self.value = op.gather(read, beams, _number(0))

    def keep(self, value: Any) -> None:
        """Let it be ``value`` after a call."""
        self._sinks.append(op.assign(value, self._variable))


def _parameters(*named: Any) -> dict[str, Any]:
    return {name: op.parameter([-1, *shape], np.float32, name=name) for name, shape in named}


def _input(name: str, kind: Any, *shape: int) -> Any:
    parameter = op.parameter(list(shape), kind, name=name)
    parameter.output(0).set_names({name})
    return parameter


def _constant(array: Any) -> Any:
    return op.constant(np.ascontiguousarray(array, dtype=np.float32))


def _number(value: Any) -> Any:
    return op.constant(np.array(value, dtype=np.int64))


def _slice(x: Any, start: int, stop: int | None) -> Any:
    end = 2**31 - 1 if stop is None else stop
    return op.slice(x, _number([start]), _number([end]), _number([1]), _number([TIME]))


def _times(x: Any, weight: Any) -> Any:
    return op.matmul(x, _constant(weight), False, True)


def _norm(x: Any, weight: Any) -> Any:
    mean = op.reduce_mean(op.multiply(x, x), _number([-1]), True)
    scaled = op.divide(x, op.sqrt(op.add(mean, op.constant(np.float32(EPSILON)))))
    return op.multiply(scaled, _constant(weight))


if __name__ == "__main__":
    main()
