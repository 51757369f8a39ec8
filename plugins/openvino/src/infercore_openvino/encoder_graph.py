"""The graph of an encoder: whole texts in, the hidden state of each token out, nothing kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infercore import ModelFormatError
from infercore_openvino import graph
from infercore_openvino.facts import n_layer, whole

if TYPE_CHECKING:
    from infercore_openvino.files import ModelFiles

FORM = "encoder"
HIDDEN, SCORES = "last_hidden_state", "logits"
_NEEDED = {"input_ids", "attention_mask"}
_KNOWN = _NEEDED | {"token_type_ids", "position_ids"}
_HIDDEN_RANK, _SCORES_RANK = 3, 2
_TABLE_RANK = 2


def build(core: Any, files: ModelFiles, path: str) -> graph.Graph:
    """Read the graph. Raises `ModelFormatError` for a broken file or one that is no encoder."""
    model = graph.read(core, files.xml, path)
    _check(model, path, output_of(files))
    n_vocab, width = _table(model, path)
    shape = graph.Shape(
        n_vocab=n_vocab,
        n_embd=whole(files.config, "hidden_size") or width
        if files.ranks
        else model.output(HIDDEN).partial_shape[2].get_length(),
        n_layer=n_layer(files.config),
        n_params=graph.count_params(model),
    )
    return graph.Graph(model=model, form=FORM, shape=shape, inv_freq=None, config=files.config)


def output_of(files: ModelFiles) -> str:
    """Return the name of the output that is read: of scores, or of hidden states."""
    return SCORES if files.ranks else HIDDEN


def _check(model: Any, path: str, output: str) -> None:
    inputs, outputs = graph.names(model.inputs), graph.names(model.outputs)
    if not (_NEEDED <= inputs <= _KNOWN and output in outputs):
        raise graph.unknown_kind(model, path)
    found = model.output(output).partial_shape
    rank = _HIDDEN_RANK if output == HIDDEN else _SCORES_RANK
    if found.rank.get_length() != rank or found[rank - 1].is_dynamic:
        raise graph.unknown_kind(model, path)
    if any(size.is_static for port in model.inputs for size in port.partial_shape):
        raise ModelFormatError(
            f"{path} takes texts of one length only; export it with dynamic shapes", path=path
        )


def _table(model: Any, path: str) -> tuple[int, int]:
    """Return rows and columns of the table in which the ids of the tokens are looked up."""
    waiting = [model.input("input_ids")]
    while waiting:
        for target in waiting.pop().get_target_inputs():
            node = target.get_node()
            if node.get_type_name() == "Convert":
                waiting.append(node.output(0))
            elif node.get_type_name() == "Gather" and target.get_index() == 1:
                table = node.input(0).get_partial_shape()
                if table.rank.get_length() == _TABLE_RANK and table.is_static:
                    n_vocab, width = (size.get_length() for size in table)
                    return n_vocab, width
    raise ModelFormatError(f"{path} has no table of token embeddings that is known", path=path)
