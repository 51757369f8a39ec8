"""Models that rank: the pack's encoder with a head of random weights, for either engine."""

from __future__ import annotations

import json
import math
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.weight_files import gguf
from rows.bench import write_gguf

if TYPE_CHECKING:
    from pathlib import Path

    from infercore.protocols.spi import FloatArray

RANK = 4  # of llama.cpp's enum of poolings


def write(encoder: Path, target: Path) -> Path:
    """Write the GGUF file ``target`` from that of an encoder, in float32."""
    header, tensors = _read(encoder)
    random, n_embd = np.random.default_rng(8), int(header.own("embedding_length"))
    for name, n_out in (("cls", n_embd), ("cls.output", 1)):
        tensors[f"{name}.weight"] = random.normal(0, 0.3, (n_out, n_embd)).astype(np.float32)
        tensors[f"{name}.bias"] = np.zeros(n_out, np.float32)
    metadata: dict[str, Any] = {
        key: [x.decode() if isinstance(x, bytes) else x for x in value]
        if isinstance(value, tuple)
        else value
        for key, value in header.metadata.items()
    }
    metadata["bert.pooling_type"] = RANK
    return write_gguf(target, metadata, tensors)


def write_ir(encoder: Path, head: Path, target: Path) -> Path:
    """Write the folder ``target``: an encoder in OpenVINO's format with the head of a GGUF file."""
    import openvino as ov
    from openvino import opset13 as op

    _, weights = _read(head)
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


def _read(path: Path) -> tuple[gguf.Header, dict[str, FloatArray]]:
    """Return the header and the tensors of a file that has float32 alone."""
    header, data = gguf.read(str(path)), path.read_bytes()
    return header, {
        one.name: np.frombuffer(data, "<f4", math.prod(one.dims), one.offset).reshape(
            one.dims[::-1]
        )
        for one in header.tensors.values()
    }
