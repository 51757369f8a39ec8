"""The same weights under the names of other architectures, of which each computes in its way."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from infercore.conformance import gguf_copy
from infercore.conformance.expect import LawError, equal, foreseen, that
from infercore.conformance.gguf_copy import FLOAT32, UINT32, number
from infercore.conformance.law import law
from infercore.conformance.laws.cancel import AfterCalls
from infercore.conformance.laws.edges import OF_ROPE, REFUSED
from infercore.conformance.laws.forged import check_left, check_shared
from infercore.conformance.laws.headers import bytes_of, is_gguf, loaded
from infercore.errors import DecodeAbortedError, ModelLoadError, UnsupportedFeatureError
from infercore.weight_files.gguf import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from infercore.conformance.rig import Rig

_MAX_BYTES, _ROUNDED = 2**26, 2**15
_F32 = 0
_BIASES = (("attn_q.bias", "attn_q"), ("attn_k.bias", "attn_k"), ("attn_v.bias", "attn_v"))
_NORMS = (("attn_q_norm.weight", None), ("attn_k_norm.weight", None))
_ALWAYS: dict[str, tuple[tuple[str, str | None], ...]] = {
    "qwen2vl": _BIASES,
    "qwen3vl": _NORMS,
    "smollm3": (),
    "refact": (),
    "mistral3": (),
}
"""Of these a position has several parts, or some layers turn no keys, or none does, or a header's
own numbers count; and the tensors that they have beside those of a plain llama."""
_SOME: dict[str, tuple[tuple[str, str | None], ...]] = {
    "qwen2": _BIASES,
    "qwen3": _NORMS,
    "paddleocr": (),
    "gemma": (),
    "exaone": (),
    "ernie4_5": (),
    "deci": (),
    "hunyuan-dense": _NORMS,
}
_FOLDERS = ("mistral", "qwen2", "qwen3", "smollm3", "gemma", "granite", "exaone4", "olmo2")
_YARN = {
    "scaling.type": gguf_copy.text("yarn"),
    "scaling.factor": number(FLOAT32, 4.0),
    "scaling.original_context_length": number(UINT32, 64),
    "scaling.yarn_beta_fast": number(FLOAT32, 1.5),
    "scaling.yarn_beta_slow": number(FLOAT32, 0.05),
}
_PLACES = tuple((share / 6, 0, b"\xff" * 4) for share in range(1, 6))
_N, _MOVED = 40, 31
_OF_PARTS = ("qwen2vl",)
_MIXED = "lfm2"
"""Whose layers attend, or keep a state that cannot be cut."""
_SLIDING = "gemma2"
"""Of which some layers look back over a window only, or all."""
_WINDOW = 16
_LEARNED = "gpt2"
"""Whose positions are learned, so that keys cannot be turned to others."""


@law("CAP-46", since="1.2")
def check_other_names(rig: Rig) -> None:
    """The same weights under the name of another architecture keep the promises, or are refused.

    Token by token as in one call, cut, stopped, saved, moved and copied, as rows in place of
    tokens, beside embeddings, and with what is told of rope, scaled too. One has layers of two
    kinds, one has windows, and one has learned positions. Each may compute otherwise.
    """
    path = Path(rig.path) if rig.path is not None else rig.leave("the rig names no path")
    if bytes_of(path) > _MAX_BYTES:
        rig.leave(f"the model has more than {_MAX_BYTES >> 20} MiB, too much to copy")
    n_taken = 0
    with tempfile.TemporaryDirectory() as scratch:
        for name, copies in _named(rig, path, Path(scratch)):
            n_taken += _try(rig, copies[0], name, _check_model)
            n_taken += _try(rig, copies[-1], name, _check_rope)
    if not n_taken:
        rig.leave("no other name is taken for these weights")


def _try(rig: Rig, path: Path, name: str, check: Callable[[Rig, Any, str], None]) -> bool:
    """Return whether the weights are taken under this name."""
    try:
        opened = loaded(rig, str(path))
    except (ModelLoadError, UnsupportedFeatureError) as error:
        foreseen(error, f"the weights as {name}")
        return False
    with opened as model:
        if model.info.has_encoder:
            return False
        check(rig, model, name)
    return True


def _named(rig: Rig, path: Path, scratch: Path) -> Iterator[tuple[str, list[Path]]]:
    """Yield names, and what holds the weights under each: with rope as it is, and scaled."""
    if not is_gguf(path):
        if not (path / "config.json").is_file():
            rig.leave("the model is neither a GGUF file nor a folder with a config.json")
        folder = scratch / path.name
        shutil.copytree(path, folder)
        file = folder / "config.json"
        file.chmod(0o600)
        config = json.loads(file.read_text(encoding="utf-8"))
        name = rig.random.choice(_FOLDERS)
        file.write_text(json.dumps({**config, "model_type": name}), encoding="utf-8")
        yield name, [folder]
        return
    own = gguf_copy.read(path)
    if b"llama" not in own.entries["general.architecture"]:
        rig.leave("the weights are not those of a plain llama")
    other = rig.random.choice(sorted(_SOME))
    built = dict(_BUILT)
    if len({tensor.kind for tensor, _ in own.tensors if re.search("attn_[qkv]", tensor.name)}) > 1:
        del built[_LEARNED]  # it keeps them in one tensor, of one type
    for name, added in {**_ALWAYS, other: _SOME[other], **built}.items():
        plain = _renamed(own, rig, name, added)
        if name in _CHANGED:
            plain = _CHANGED[name](plain, rig)
        to_scale = plain
        if name == _SLIDING:
            to_scale = _sliding(plain, rig, lambda i: i % 2)
            plain = rig.random.choice((to_scale, _sliding(plain, rig, lambda _: 1)))
        scaled = to_scale.other(**{f"{name}.rope.{key}": value for key, value in _YARN.items()})
        files = [scratch / f"{name}{i}.gguf" for i in range(2)]
        for file, changed in zip(files, (plain, scaled), strict=True):
            file.write_bytes(changed.to_bytes())
        yield name, files
        for file in files:
            file.unlink()


def _renamed(
    own: gguf_copy.Gguf, rig: Rig, name: str, added: Sequence[tuple[str, str | None]]
) -> gguf_copy.Gguf:
    entries = {
        key.replace("llama.", f"{name}.", 1) if key.startswith("llama.") else key: value
        for key, value in own.entries.items()
    }
    entries["general.architecture"] = gguf_copy.text(name)
    head = rig.model.info.n_embd // rig.model.info.n_head
    if name.endswith("vl") or name == "paddleocr":
        sections = [head // 4, head // 8, head // 8, 0]
        entries[f"{name}.rope.dimension_sections"] = gguf_copy.numbers("i", sections)
    dims = {tensor.name: tensor.dims for tensor, _ in own.tensors}
    tensors = list(own.tensors)
    for i in range(rig.model.info.n_layer):
        for tensor, of in added:
            n = head if of is None else dims[f"blk.{i}.{of}.weight"][1]
            data = np.full(n, of is None, np.float32).tobytes()
            tensors.append((Tensor(f"blk.{i}.{tensor}", (n,), _F32, 0), data))
    return attrs.evolve(own, entries=entries, tensors=tensors)


def _mixed(own: gguf_copy.Gguf, rig: Rig) -> gguf_copy.Gguf:
    """Return it with convolutions in place of the attention of each second layer."""
    info, kept = rig.model.info, list[tuple[Tensor, bytes]]()
    numbers = np.random.default_rng(5)
    for tensor, data in own.tensors:
        name = tensor.name
        if name == "output_norm.weight":
            kept.append((Tensor("token_embd_norm.weight", tensor.dims, tensor.kind, 0), data))
        elif not re.match(r"blk\.\d*[02468]\.attn_[qkvo]", name):
            kept.append((tensor, data))
    n, width = info.n_embd, 3
    for i in range(0, info.n_layer, 2):
        for what, dims in (("conv", (width, n)), ("in_proj", (n, 3 * n)), ("out_proj", (n, n))):
            data = (numbers.standard_normal(dims) / dims[0] ** 0.5).astype(np.float32).tobytes()
            kept.append((Tensor(f"blk.{i}.shortconv.{what}.weight", dims, _F32, 0), data))
    heads = [info.n_head_kv * (i % 2) for i in range(info.n_layer)]
    entries = {
        **own.entries,
        f"{_MIXED}.shortconv.l_cache": number(UINT32, width),
        f"{_MIXED}.attention.head_count_kv": gguf_copy.numbers("i", heads),
    }
    return attrs.evolve(own, entries=entries, tensors=kept)


def _learned(own: gguf_copy.Gguf, rig: Rig) -> gguf_copy.Gguf:
    """Return it with learned positions, one product for Q, K and V, and biases of 0."""
    info = rig.model.info
    weights = {tensor.name: (tensor, data) for tensor, data in own.tensors}
    for i in range(info.n_layer):
        parts = [weights.pop(f"blk.{i}.attn_{what}.weight") for what in "qkv"]
        dims = (info.n_embd, sum(tensor.dims[1] for tensor, _ in parts))
        name, data = f"blk.{i}.attn_qkv.weight", b"".join(data for _, data in parts)
        weights[name] = Tensor(name, dims, parts[0][0].kind, 0), data
        del weights[f"blk.{i}.ffn_gate.weight"]
    kept = list(weights.values())
    for tensor, _ in list(kept):
        if tensor.name.startswith(("blk.", "output_norm.")):
            n, name = tensor.dims[-1], tensor.name.replace("weight", "bias")
            kept.append((Tensor(name, (n,), _F32, 0), bytes(4 * n)))
    dims = (info.n_embd, info.n_ctx_train)
    positions = np.random.default_rng(5).standard_normal(dims).astype(np.float32) / 10
    kept.append((Tensor("position_embd.weight", dims, _F32, 0), positions.tobytes()))
    entries = {**own.entries, f"{_LEARNED}.attention.layer_norm_epsilon": number(FLOAT32, 1e-5)}
    return attrs.evolve(own, entries=entries, tensors=kept)


_BUILT = {_MIXED: _NORMS, _SLIDING: (), _LEARNED: ()}
_CHANGED = {_MIXED: _mixed, _LEARNED: _learned}


def _sliding(own: gguf_copy.Gguf, rig: Rig, has_window: Callable[[int], int]) -> gguf_copy.Gguf:
    """Return it with norms behind attention and products, and with windows in some layers."""
    info = rig.model.info
    kept = [(tensor, data) for tensor, data in own.tensors if tensor.name != "output.weight"]
    ones = np.ones(info.n_embd, np.float32).tobytes()
    kept += [
        (Tensor(f"blk.{i}.{what}.weight", (info.n_embd,), _F32, 0), ones)
        for i in range(info.n_layer)
        for what in ("post_attention_norm", "post_ffw_norm")
    ]
    kinds = [has_window(i) for i in range(info.n_layer)]
    entries = {
        **own.entries,
        f"{_SLIDING}.attention.sliding_window": number(UINT32, _WINDOW),
        f"{_SLIDING}.attention.sliding_window_pattern": gguf_copy.numbers("?", kinds),
    }
    return attrs.evolve(own, entries=entries, tensors=kept)


def _cold(rig: Rig, model: Any, tokens: Sequence[int], **fields: Any) -> Any:
    with model.new_context(**rig.fields(**fields)) as context:
        context.decode(tokens)
        return np.array(context.logits())


def _check_model(rig: Rig, model: Any, name: str) -> None:
    tokens, other, more = rig.tokens(_N), rig.tokens(9), rig.tokens(2)
    expected = _cold(rig, model, tokens)
    that(np.isfinite(expected).all(), f"{name}: logits that are no numbers")
    with model.new_context(**rig.fields()) as context:
        kinds = context.capabilities
        context.decode(tokens[:17])
        for token in tokens[17:20]:
            context.decode_one(token)
        context.decode(tokens[20:])
        rig.near(context.logits(), expected, f"{name}: a text in pieces")
        if kinds.kv_shift:
            context.seq_shift(0, 0, -1, _MOVED)
            context.decode_one(more[0])
            row = _cold(rig, model, [*tokens, more[0]])
            rig.near(context.logits(), row, f"{name}: a text that was moved")
        _check_undone(rig, context, name, tokens, expected)
    with (
        contextlib.suppress(UnsupportedFeatureError),
        model.new_context(**rig.fields(embeddings=True)) as context,
    ):
        context.decode(tokens)
        rig.near(context.logits(), expected, f"{name}: logits beside embeddings")
    is_plain = name in _ALWAYS and name not in _OF_PARTS
    if not is_plain and kinds.sequence_state and kinds.multi_sequence:
        _check_saved(rig, model, name, (tokens, other, more))
    if not is_plain:
        _check_plan(rig, model, name)
    if is_gguf(Path(str(rig.path))) and name != "gemma":  # which scales the rows of tokens alone
        _check_rows(rig, model, name, tokens, expected)


def _check_saved(rig: Rig, model: Any, name: str, texts: tuple[list[int], ...]) -> None:
    """A saved text goes on as it was, in every form of cache; what is forged of it spoils none."""
    tokens, other, more = texts
    expected = [_cold(rig, model, text + more) for text in (tokens, other)]
    fields = {"n_seq_max": 3, "n_ctx": 3 * rig.n_ctx}
    saved: dict[str, tuple[bytes, bytes]] = {}
    for unified in (True, False):
        with (
            contextlib.suppress(UnsupportedFeatureError),
            model.new_context(**rig.fields(**fields, kv_unified=unified)) as context,
        ):
            context.decode(other, seq_id=1)
            context.decode(tokens, seq_id=0)
            saved[f"kv_unified={unified}"] = context.save_sequence(0), context.save_state()
            _check_copied(rig, context, (tokens, more), expected[0], name)
    for unified in (True, False):
        with (
            contextlib.suppress(UnsupportedFeatureError),
            model.new_context(**rig.fields(**fields, kv_unified=unified)) as context,
        ):
            for what, (data, whole) in saved.items():
                told = f"{name}: saved with {what}, restored with kv_unified={unified}"
                context.clear()
                context.decode(other, seq_id=1)
                context.load_sequence(2, data)
                for seq_id, row in ((2, expected[0]), (1, expected[1])):
                    context.decode(more, seq_id=seq_id)
                    rig.near(context.logits(), row, f"{told}, sequence {seq_id}")
                if what.endswith(str(unified)):
                    context.load_state(whole)
                    for seq_id, row in enumerate(expected):
                        context.decode(more, seq_id=seq_id)
                        rig.near(context.logits(), row, f"{told}, the state, sequence {seq_id}")
            context.clear()
            if not unified and context.capabilities.kv_remove != "none":
                check_left(rig, other, 12, _PLACES, context, f"{name}: ")
    if name in (*_OF_PARTS, _MIXED):
        fields = {"n_seq_max": 3, "n_ctx": rig.n_ctx}
        with model.new_context(**rig.fields(**fields)) as context:
            check_shared(
                rig, context, lambda text: _cold(rig, model, text, **fields), f"{name}: ", 6
            )


def _check_copied(
    rig: Rig, context: Any, texts: tuple[list[int], ...], expected: Any, name: str
) -> None:
    """A copy of a text goes on as it does, saved at once or not; so it does beside a warm-up."""
    tokens, more = texts
    if context.capabilities.kv_copy == "none":
        context.decode(tokens, seq_id=2)
    else:
        context.seq_copy(0, 2)
    data = context.save_sequence(2)
    context.load_sequence(1, data)
    for seq_id in (2, 1, 0):
        with contextlib.suppress(UnsupportedFeatureError):
            context.warmup()
        context.decode(more, seq_id=seq_id)
        rig.near(context.logits(), expected, f"{name}: sequence {seq_id}, a copy or its source")
    context.clear()
    with contextlib.suppress(UnsupportedFeatureError):
        context.decode_batch([(token, (0, 1), False) for token in tokens])
        for seq_id in (0, 1):
            context.decode(more, seq_id=seq_id)
            rig.near(context.logits(), expected, f"{name}: sequence {seq_id} of tokens of two")


def _check_undone(rig: Rig, context: Any, name: str, tokens: list[int], expected: Any) -> None:
    """A text that was cut, or whose evaluation was stopped, goes on as it would have."""
    context.clear()
    context.decode([*tokens[:20], *tokens[:5]])
    kind = context.capabilities.kv_remove
    is_cut = kind != "none" and context.seq_remove(0, 20, -1)
    that(is_cut or kind != "any", f"{name}: any part can be removed, and the end of a text is not")
    if is_cut:
        context.decode(tokens[20:])
        rig.near(context.logits(), expected, f"{name}: a text that was cut")
    for n_asked in (0, 2, 7) if context.capabilities.abort else ():
        context.clear()
        context.set_abort_callback(AfterCalls(n_asked))
        with contextlib.suppress(DecodeAbortedError):
            context.decode(tokens)
        context.set_abort_callback(None)
        rest = tokens[context.n_past() :]
        if rest:
            context.decode(rest)
        rig.near(context.logits(), expected, f"{name}: stopped at question {n_asked}")


def _check_plan(rig: Rig, model: Any, name: str) -> None:
    """Each kind of layer has its share of a planned cache."""
    with contextlib.suppress(UnsupportedFeatureError):
        kinds, usual = (
            each.plan_memory(**rig.fields()).kv_bytes_by_kind for each in (model, rig.model)
        )
        if not kinds:
            return  # it tells no kinds
        keeps = model.info.is_recurrent or model.info.is_hybrid
        equal("recurrent" in kinds, keeps, f"{name}: whether a state is planned, of {kinds}")
        if name == _MIXED and "full" in usual:
            share = usual["full"] * (model.info.n_layer // 2) / model.info.n_layer
            is_near = abs(kinds.get("full", 0) - share) <= _ROUNDED
            that(is_near, f"{name}: {kinds} planned, {usual} for attention in all layers")


def _check_rows(rig: Rig, model: Any, name: str, tokens: list[int], expected: Any) -> None:
    """The rows of the tokens, in place of them, compute the same, or are refused."""
    for tensor, data in gguf_copy.read(Path(str(rig.path))).tensors:
        if tensor.name != "token_embd.weight" or tensor.kind != _F32:
            continue
        n = tensor.dims[0]
        rows = np.frombuffer(data, np.float32)[: n * tensor.dims[1]].reshape(-1, n)[tokens]
        with (
            contextlib.suppress(UnsupportedFeatureError),
            model.new_context(**rig.fields()) as context,
        ):
            for part in (rows[:25], rows[25:]):
                context.decode_spans([(0, np.ascontiguousarray(part), "last")])
            rig.near(context.logits(), expected, f"{name}: rows in place of tokens")


def _check_rope(rig: Rig, model: Any, name: str) -> None:
    """What is told of rope computes the same where it is asked for; another base counts."""
    tokens = rig.tokens(_N)
    own, more = _cold(rig, model, tokens), rig.tokens(1)
    with model.new_context(**rig.fields()) as context:
        told = {key: context.effective.get(key) for key in OF_ROPE}
        if context.capabilities.kv_shift:
            context.decode(tokens)
            context.seq_shift(0, 0, -1, _MOVED)
            context.decode(more)
            row = _cold(rig, model, tokens + more)
            rig.near(context.logits(), row, f"{name}: a text that was moved, with {told}")
    asked = {key: value for key, value in told.items() if value is not None}
    try:
        again = _cold(rig, model, tokens, **asked)
    except REFUSED as error:
        raise LawError(f"{name}: what is told of rope is refused: {error}") from error
    rig.near(again, own, f"{name}: logits with what is told of rope: {told}")
    try:
        other = _cold(rig, model, tokens, rope_freq_base=300.0)
    except REFUSED as error:
        that("rope" in str(error), f"{name}: another base of rope is refused: {error}")
        return
    gap = float(np.abs(other - own).max())
    that(gap > 0, f"{name}: another base of rope is taken and changes nothing")
