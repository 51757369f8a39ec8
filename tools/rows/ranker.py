"""Models that rank: the pack's encoder with a head of random weights, for either engine."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import gguf
import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

RANK = 4  # of llama.cpp's enum of poolings


def write(encoder: Path, target: Path) -> Path:
    """Write the GGUF file ``target`` from that of an encoder."""
    reader = gguf.GGUFReader(encoder)
    writer = gguf.GGUFWriter(target, "bert")
    for key, entry in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind = entry.types[0]
        sub = entry.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        value = RANK if key == "bert.pooling_type" else entry.contents()
        writer.add_key_value(key, value, kind, sub_type=sub)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    random, n_embd = (
        np.random.default_rng(8),
        int(reader.fields["bert.embedding_length"].contents()),
    )
    for name, n_out in (("cls", n_embd), ("cls.output", 1)):
        weight = random.normal(0, 0.3, (n_out, n_embd)).astype(np.float32)
        writer.add_tensor(f"{name}.weight", weight)
        writer.add_tensor(f"{name}.bias", np.zeros(n_out, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def write_ir(encoder: Path, head: Path, target: Path) -> Path:
    """Write the folder ``target``: an encoder in OpenVINO's format with the head of a GGUF file."""
    import openvino as ov
    from openvino import opset13 as op

    weights = {t.name: np.array(t.data) for t in gguf.GGUFReader(head).tensors}
    model = ov.Core().read_model(encoder / "openvino_model.xml")
    hidden = model.output("last_hidden_state").get_node().input_value(0)
    first = op.gather(hidden, op.constant(np.int64(0)), op.constant(np.int64(1)))
    inner = op.tanh(op.matmul(first, op.constant(weights["cls.weight"]), False, True))
    scores = op.matmul(inner, op.constant(weights["cls.output.weight"]), False, True)
    scores.output(0).set_names({"logits"})
    shutil.copytree(encoder, target, ignore=shutil.ignore_patterns("openvino_model.*"))
    ranking = ov.Model([op.result(scores)], model.get_parameters(), "ranker")
    ov.save_model(ranking, target / "openvino_model.xml", compress_to_fp16=False)
    config = json.loads((target / "config.json").read_text())
    config["architectures"] = ["BertForSequenceClassification"]
    (target / "config.json").write_text(json.dumps(config))
    return target
