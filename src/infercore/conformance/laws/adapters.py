"""LoRA adapters, applied while a model runs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from infercore.conformance import gguf_copy, safetensors_copy
from infercore.conformance.expect import equal, foreseen, raises, that
from infercore.conformance.gguf_copy import UINT32, number
from infercore.conformance.law import law
from infercore.conformance.laws.headers import is_gguf, loaded
from infercore.conformance.rig import greedy
from infercore.errors import (
    InferCoreError,
    InvalidInputError,
    ManifestMismatchError,
    ModelLoadError,
    UnsupportedFeatureError,
)
from infercore.values.config import AdapterSpec
from infercore.values.session import PrefixInput
from infercore.weight_files import lora
from infercore.weight_files.lora import Pair

if TYPE_CHECKING:
    from collections.abc import Iterator

    from infercore.conformance.rig import Rig

lora_law: dict[str, Any] = {"needs": "lora", "since": "1.1"}


def _adapter(rig: Rig, scale: float = 1.0) -> AdapterSpec:
    if rig.adapter is None:
        rig.leave("the rig has no adapter")
    return AdapterSpec(path=rig.adapter, scale=scale)


def _row(context: Any, tokens: list[int], *adapters: AdapterSpec) -> Any:
    """Return the logits with these adapters, all else anew."""
    context.set_adapters(adapters)
    context.clear()
    context.decode(tokens)
    return np.array(context.logits())


@contextlib.contextmanager
def _copied(path: str) -> Iterator[str]:
    """Give a copy of the adapter's file or folder, which an engine knows as another one."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(path), Path(folder) / Path(path).name
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy(source, target)
        yield str(target)


@law("LORA-1", **lora_law)
def check_an_adapter_changes_the_logits(rig: Rig) -> None:
    """An adapter changes the logits; at scale 0 it does not; without it the old bits are back."""
    rig.need_all_logits()
    tokens, context = rig.tokens(7), rig.context()
    plain = _row(context, tokens)
    gap = float(np.abs(_row(context, tokens, _adapter(rig)) - plain).max())
    that(gap > 10 * rig.tolerance, f"the adapter moves the logits by {gap:.3g} only")
    rig.near(_row(context, tokens, _adapter(rig, 0.0)), plain, "logits at scale 0")
    rig.same_bits(_row(context, tokens), plain, "logits after the adapter was removed")


@law("LORA-2", **lora_law)
def check_the_adapter_is_the_reference_s(rig: Rig) -> None:
    """The logits with the pack's adapter are those of weights it was merged into.

    Also at a scale that drives scores of attention to thousands, where an exponential overflows.
    """
    whole = _adapter(rig)
    if rig.adapter_name is None:
        rig.leave("the adapter is none of the pack's")
    import infercore_models  # noqa: PLC0415  (a distribution of its own; the rig has found it)
    from infercore.testing import load_reference_model  # noqa: PLC0415

    tokens, context = rig.tokens(12), rig.context()
    path = str(infercore_models.path(rig.adapter_name, "hf"))
    for scale in (1.0, -0.5, 10.0):
        merged = load_reference_model(merged=[AdapterSpec(path=path, scale=scale)])
        with merged, merged.new_context(n_ctx=rig.n_ctx) as oracle:
            oracle.decode(tokens)
            expected = np.array(oracle.logits())
        found = _row(context, tokens, attrs.evolve(whole, scale=scale))
        rig.near(found, expected, f"logits at scale {scale}")


@law("LORA-3", **lora_law)
def check_adapters_add_up(rig: Rig) -> None:
    """Two adapters add up: one at half scale, plus itself or a copy at half, equal the whole.

    So do two files that each have a part of its matrices.
    """
    tokens, context = rig.tokens(7), rig.context()
    half = _adapter(rig, 0.5)
    whole = _row(context, tokens, _adapter(rig))
    rig.near(_row(context, tokens, half, half), whole, "an adapter named twice at half its scale")
    with _copied(half.path) as path:
        copy = AdapterSpec(path=path, scale=0.5)
        rig.near(_row(context, tokens, half, copy), whole, "two adapters at half their scale")
    with _copied(half.path) as first, _copied(half.path) as second:
        if all(_keep_half(Path(path), i) for i, path in enumerate((first, second))):
            parts = [AdapterSpec(path=path) for path in (first, second)]
            rig.near(_row(context, tokens, *parts), whole, "an adapter in two files")


def _keep_half(adapter: Path, which: int) -> bool:
    """Leave out every other matrix of a folder in PEFT's format; False for any other adapter."""
    file = adapter / lora.TENSORS
    if not file.is_file():
        return False
    tensors = safetensors_copy.read(file)
    modules = sorted({name.rpartition(".lora_")[0] for name in tensors if ".lora_" in name})
    chosen = modules[which::2]
    kept = {name: each for name, each in tensors.items() if name.rpartition(".lora_")[0] in chosen}
    safetensors_copy.write(file, kept)
    return True


@law("LORA-4", **lora_law)
def check_the_list_is_replaced(rig: Rig) -> None:
    """set_adapters replaces the whole list: what was applied before no longer counts.

    Nor does it in contexts with other settings that are opened afterwards.
    """
    tokens, context = rig.tokens(7), rig.context()
    plain = rig.cold(tokens)
    _row(context, tokens, _adapter(rig))
    found = _row(context, tokens, _adapter(rig, 0.25))
    fresh = _row(rig.context(), tokens, _adapter(rig, 0.25))
    rig.same_bits(found, fresh, "logits at a quarter of the scale, after the whole")
    equal(tuple(context.effective["adapters"]), (_adapter(rig, 0.25),), "effective adapters")
    for fields in ({"n_threads": 2, "n_threads_batch": 2}, {"embeddings": True}, {"n_seq_max": 2}):
        with contextlib.suppress(UnsupportedFeatureError, InvalidInputError):
            rig.near(rig.cold(tokens, **fields), plain, f"logits without adapters, {fields}")


@law("LORA-5", **lora_law)
def check_a_context_opened_with_adapters(rig: Rig) -> None:
    """Adapters can be given when a context is opened; other contexts are not touched."""
    tokens, adapter = rig.tokens(7), _adapter(rig)
    plain = rig.context()
    opened = rig.context(adapters=[adapter])
    equal(tuple(opened.effective["adapters"]), (adapter,), "effective adapters")
    opened.decode(tokens)
    later = _row(rig.context(), tokens, adapter)
    rig.same_bits(np.array(opened.logits()), later, "opened with it, and set later")
    plain.decode(tokens)
    rig.same_bits(np.array(plain.logits()), rig.cold(tokens), "a context beside it")


@law("LORA-6", **lora_law)
def check_what_is_no_adapter(rig: Rig) -> None:
    """A file that is missing or no adapter for this model is a typed error; the list stays.

    The error of a file has its path.
    """
    tokens, adapter = rig.tokens(7), _adapter(rig)
    context, other = rig.context(adapters=[adapter]), _adapter(rig, 0.5)
    expected = _row(rig.context(), tokens, adapter)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text"
        text.write_text("no adapter")
        empty = Path(folder) / "empty"
        empty.mkdir()
        for path in (str(Path(folder) / "none"), str(text), str(empty), rig.path):
            if path is None:
                continue
            bad = AdapterSpec(path=path)
            for what, call in (
                ("set alone", lambda b=bad: context.set_adapters([b])),
                ("set before another", lambda b=bad: context.set_adapters([b, adapter])),
                ("set behind another", lambda b=bad: context.set_adapters([other, b])),
                ("opened with", lambda b=bad: rig.context(adapters=[b])),
            ):
                error = raises(InferCoreError, call, f"{path}, {what}")
                if isinstance(error, ModelLoadError):
                    that(path in str(error.path), f"{path}: the path is {error.path!r}")
                    foreseen(error, path)
                equal(tuple(context.effective["adapters"]), (adapter,), f"in force, {path} {what}")
                context.clear()
                context.decode(tokens)
                row = np.array(context.logits())
                rig.same_bits(row, expected, f"logits after {path} was refused, {what}")
    if is_gguf(Path(adapter.path)):
        _check_lies(rig, adapter.path)


def _check_lies(rig: Rig, path: str) -> None:
    """An adapter whose header has other types of entries, or of a tensor, is refused, or works."""
    own = gguf_copy.read(Path(path))
    *others, (last, data) = own.tensors
    lies = {
        "its own": own,
        **{
            f"{key} of 5": own.other(**{key.replace(".", "__"): number(UINT32, 5)})
            for key in ("general.type", "general.architecture", "adapter.type")
        },
        "an alpha that is a text": own.other(adapter__lora__alpha=gguf_copy.text("x")),
        **{
            f"a tensor of {what} in 8 bits": attrs.evolve(
                own, tensors=[*others, (dataclasses.replace(last, kind=24), rows)]
            )
            for what, rows in (("numbers", data), ("zeros", bytes(math.prod(last.dims))))
        },
        "of another kind": own.other(adapter__type=gguf_copy.text("xora")),
    }
    with tempfile.TemporaryDirectory() as folder, loaded(rig, str(rig.path)) as model:
        file = Path(folder) / "adapter.gguf"
        for what, changed in lies.items():
            file.write_bytes(changed.to_bytes())
            fields = rig.fields(adapters=[AdapterSpec(path=str(file))])
            try:
                with model.new_context(**fields) as context:
                    context.decode(rig.tokens(3))
            except UnsupportedFeatureError as error:
                that(what != "its own" and error.hint, f"{what} is refused: {error}")
            except ModelLoadError as error:
                that(what != "its own", f"a copy of the adapter is refused: {error}")
                foreseen(error, what)
                that(str(file) in str(error.path), f"{what}: the path is {error.path!r}")


@law("LORA-7", tier="session", **lora_law)
def check_adapters_are_identity(rig: Rig) -> None:
    """Sessions with different adapters have different identities: they never share KV."""
    plain, text = rig.session(), rig.passage(10)
    other, third = (rig.session(adapters=[_adapter(rig, scale)]) for scale in (1.0, 0.5))
    n = other.ensure_prefix(text).prefix_tokens
    reports = [session.explain_context() for session in (plain, other, third)]
    equal(len({report.manifest_digest for report in reports}), 3, "different digests")
    equal([len(report.manifest.adapters) for report in reports], [0, 1, 1], "adapters told")
    foreign = PrefixInput(text=text, manifest=reports[0].manifest)
    status = other.ensure_prefix(foreign)
    equal((status.reused_tokens, status.prefilled_tokens), (0, n), "reused and prefilled")
    that("adapters" in (status.reset_reason or ""), f"the reason {status.reset_reason!r}")
    if plain.context.capabilities.sequence_state:
        snapshot = other.snapshot()
        error = raises(ManifestMismatchError, lambda: plain.restore(snapshot), "a foreign snapshot")
        equal((error.field, plain.state), ("adapters", "EMPTY"), "field, and state afterwards")


@law("LORA-8", tier="session", **lora_law)
def check_a_warm_session_with_an_adapter(rig: Rig) -> None:
    """A session with an adapter generates from a warm context what a cold one does."""
    adapter, text, suffix = _adapter(rig), rig.passage(12), " " + rig.passage(6)
    session = rig.session(adapters=[adapter])
    session.ensure_prefix(text)
    session.prefill_suffix(" " + rig.passage(5))
    greedy(session, 4)
    session.ensure_prefix(text)
    session.prefill_suffix(suffix)
    ids = rig.tokenizer.encode(text + suffix)
    rig.follows(ids, greedy(session, 8), "a warm run with an adapter", adapters=[adapter])


_RANK = 2
_HEAD, _TABLE = "output.weight", "token_embd.weight"


@law("LORA-12", needs="lora", since="1.2")
def check_an_adapter_of_the_output(rig: Rig) -> None:
    """An adapter of the matrix that makes logits counts as if it were merged, or is refused."""
    path = Path(rig.path) if rig.path is not None else rig.leave("the rig names no path")
    is_folder = (path / "model.safetensors").is_file() and (path / "config.json").is_file()
    if not is_folder and not is_gguf(path):
        rig.leave("the model is neither a folder of weights nor a GGUF file")
    if rig.adapter is None:
        rig.leave("the rig has no adapter")
    info, numbers = rig.model.info, np.random.default_rng(rig.random.randrange(1000))
    a = numbers.standard_normal((_RANK, info.n_embd)).astype(np.float32) * 0.1
    b = numbers.standard_normal((info.n_vocab, _RANK)).astype(np.float32)
    written = _heads_of_folder if is_folder else _heads_of_file
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(a, b, 1.0)
        plain, merged, adapter = written(rig, path, Path(folder), pair, Path(rig.adapter))
        tokens = rig.tokens(9)
        try:
            whole = rig.opened(loaded(rig, str(merged)))
            part = rig.opened(loaded(rig, str(plain)))
        except ModelLoadError as error:
            foreseen(error, "a model whose logits are made by a matrix of their own")
            rig.leave("a matrix of its own for the logits is refused")
        with whole.new_context(**rig.fields()) as context:
            expected = _row(context, tokens)
        with part.new_context(**rig.fields()) as context:
            usual = _row(context, tokens)
            rig.near(usual, rig.cold(tokens), "logits by a matrix that is a copy of the table")
            try:
                found = _row(context, tokens, AdapterSpec(path=str(adapter)))
            except (UnsupportedFeatureError, ModelLoadError) as error:
                foreseen(error, "an adapter of the matrix that makes logits")
                return
            rig.near(found, expected, "logits with an adapter of the matrix that makes them")


Heads = tuple[Path, Path, Path]
"""A model with a head of its own, one whose head is merged with an adapter, and the adapter."""


def _heads_of_folder(rig: Rig, path: Path, folder: Path, pair: Pair, _: Path) -> Heads:
    """Write folders of weights."""
    tensors = safetensors_copy.read(path / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    if table.kind != "F32" or "lm_head.weight" in tensors:
        rig.leave("the model has a head of its own, or no table in float32")
    for name, head in (("plain", table.numbers), ("merged", table.numbers + pair.b @ pair.a)):
        shutil.copytree(path, folder / name)
        changed = {**tensors, "lm_head.weight": safetensors_copy.of(head)}
        safetensors_copy.write(folder / name / "model.safetensors", changed)
        file = folder / name / "config.json"
        config = {**json.loads(file.read_text("utf-8")), "tie_word_embeddings": False}
        file.unlink()
        file.write_text(json.dumps(config), encoding="utf-8")
    adapter = folder / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "target_modules": ["lm_head"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    prefix = "base_model.model.lm_head.lora_"
    parts = {f"{prefix}A.weight": pair.a, f"{prefix}B.weight": pair.b}
    matrices = {name: safetensors_copy.of(matrix) for name, matrix in parts.items()}
    safetensors_copy.write(adapter / lora.TENSORS, matrices)
    return folder / "plain", folder / "merged", adapter


def _heads_of_file(rig: Rig, path: Path, folder: Path, pair: Pair, usual: Path) -> Heads:
    """Write GGUF files; the adapter's header is that of the ``usual`` one."""
    own = gguf_copy.read(path)
    tensors = {tensor.name: (tensor, data) for tensor, data in own.tensors}
    table, data = tensors[_TABLE]
    if table.kind != 0 or _HEAD in tensors:
        rig.leave("the model has a head of its own, or no table in float32")
    n_embd, n_vocab = table.dims
    matrix = np.frombuffer(data, np.float32)[: n_embd * n_vocab].reshape(n_vocab, n_embd)
    for name, head in (("plain", matrix), ("merged", matrix + pair.b @ pair.a)):
        added = dataclasses.replace(table, name=_HEAD), head.tobytes()
        whole = attrs.evolve(own, tensors=[*own.tensors, added])
        (folder / f"{name}.gguf").write_bytes(whole.to_bytes())
    of_head = [
        (
            dataclasses.replace(table, name=f"{_HEAD}.lora_{name}", dims=part.shape[::-1]),
            part.tobytes(),
        )
        for name, part in (("a", pair.a), ("b", pair.b))
    ]
    alpha = number(gguf_copy.FLOAT32, float(_RANK))
    adapter = attrs.evolve(gguf_copy.read(usual).other(adapter__lora__alpha=alpha), tensors=of_head)
    (folder / "adapter.gguf").write_bytes(adapter.to_bytes())
    return folder / "plain.gguf", folder / "merged.gguf", folder / "adapter.gguf"
