"""What was set stays set, and what a model's config says is what is computed."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import struct
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

import infercore
from infercore.conformance import gguf_copy
from infercore.conformance.expect import NotApplicable, equal, foreseen, that
from infercore.conformance.gguf_copy import FLOAT32, UINT32, number
from infercore.conformance.law import law
from infercore.conformance.laws.edges import OF_ROPE
from infercore.conformance.laws.headers import is_gguf, loaded, set_number
from infercore.conformance.oracle import Way
from infercore.errors import (
    DecodeAbortedError,
    InferCoreError,
    InvalidInputError,
    ModelLoadError,
    PluginError,
    SessionFatalError,
    UnsupportedFeatureError,
)
from infercore.testing import load_reference_model
from infercore.weight_files import gguf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from infercore.conformance.rig import Rig


@law("CAP-38", since="1.2")
def check_what_was_set_stays_set(rig: Rig) -> None:
    """Adapters, a control vector and attention stay as set, whatever else a context is told.

    Through a clear, removals, restored state, a warm-up, other threads and an aborted call.
    """
    oracle = rig.need_oracle()
    tokens = rig.tokens(14)
    _check_embeddings(rig)
    _check_refused_vector(rig, tokens)
    for name, (give, way, scale) in _given(rig).items():
        context = rig.context()
        try:
            give(context)
            expected = (oracle if not scale else rig.adapted(oracle, scale)).rows(tokens, way)[-1]
        except (UnsupportedFeatureError, NotApplicable):  # of others than the pack's: no oracle
            continue
        for what, disturb in _disturbances(context, tokens).items():
            with contextlib.suppress(UnsupportedFeatureError):
                disturb()
            context.clear()
            context.decode(tokens)
            rig.near(context.logits(), expected, f"{name}, after {what}")
            if way is None or way.causal:
                context.eval(tokens, 0)
                rig.near(context.logits(), expected, f"{name}, after {what}, evaluated again")


def _check_embeddings(rig: Rig) -> None:
    """Embeddings that are switched on or off are so by effective, too."""
    for on in (True, False):
        with contextlib.suppress(UnsupportedFeatureError):
            context = rig.context(embeddings=not on)
            context.set_embeddings(on)
            equal(context.effective.get("embeddings", on), on, "effective['embeddings']")


def _check_refused_vector(rig: Rig, tokens: list[int]) -> None:
    """A control vector that is refused changes nothing."""
    n_layer, n_embd, context = rig.model.info.n_layer, rig.model.info.n_embd, rig.context()
    vector = np.asarray([rig.random.gauss(0, 0.5) for _ in range(n_embd)], np.float32)
    context.decode(tokens)
    row = np.array(context.logits())
    try:
        context.set_control_vector(dict.fromkeys(range(n_layer), vector))
    except UnsupportedFeatureError:
        context.clear()
        context.decode(tokens)
        rig.same_bits(context.logits(), row, "logits after a control vector was refused")


def _given(rig: Rig) -> dict[str, tuple[Callable[[Any], object], Way | None, float]]:
    """Return by name how to set each thing, the oracle's way of it, and the adapter's scale."""
    vector = np.asarray([rig.random.gauss(0, 0.5) for _ in range(rig.model.info.n_embd)])
    added = {rig.model.info.n_layer - 1: vector.astype(np.float32)}
    found: dict[str, tuple[Callable[[Any], object], Way | None, float]] = {
        "a control vector": (lambda c: c.set_control_vector(added), Way(added=added), 0.0),
        "attention to all": (lambda c: c.set_causal_attention(False), Way(causal=False), 0.0),
    }
    if rig.adapter is not None and rig.adapter_name is not None:
        found["an adapter"] = (lambda c: c.set_adapters(rig.adapters_at(0.5)), None, 0.5)
    return found


def _disturbances(context: Any, tokens: list[int]) -> dict[str, Callable[[], object]]:
    """Return by name what a context is told, each of which leaves what was set as it was."""

    def load_sequence() -> None:
        context.load_sequence(0, context.save_sequence(0))

    def load_state() -> None:
        context.load_state(context.save_state())

    def abort() -> None:
        context.set_abort_callback(lambda: True)
        with contextlib.suppress(DecodeAbortedError):
            context.decode(tokens)
        context.set_abort_callback(None)

    def threads() -> None:
        before = context.effective["n_threads"], context.effective["n_threads_batch"]
        context.set_threads(*before)

    return {
        "nothing": lambda: None,
        "a removal": lambda: context.seq_remove(0, 3, 5),
        "a restored sequence": load_sequence,
        "restored state": load_state,
        "a warm-up": context.warmup,
        "threads": threads,
        "an aborted call": abort,
        "embeddings": lambda: (context.set_embeddings(True), context.set_embeddings(False)),
    }


# -- config.json ---------------------------------------------------------------------------------


def _kind(name: str) -> dict[str, Any]:
    """Return what makes a llama a model of another kind, whose tensors have the same names."""
    return {"model_type": name, "architectures": [f"{name.title()}ForCausalLM"]}


_OTHER: dict[str, tuple[dict[str, Any], ...]] = {
    "llama": (
        {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
        {"rope_theta": 500.0, "rope_parameters": None},
        {"rms_norm_eps": 0.5},
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "llama3", "factor": 8.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_parameters": None},
        {"num_hidden_layers": 2},
        {"num_key_value_heads": None},
        {"tie_word_embeddings": False},
        {"model_type": "no_such_model"},
        {**_kind("mistral"), "sliding_window": 8},
        {**_kind("granite"), "embedding_multiplier": 3.0},
        {**_kind("granite"), "logits_scaling": 4.0},
        {"num_attention_heads": 0},
        {"num_key_value_heads": -2},
    ),
    "bert": (
        {"hidden_act": "relu"},
        {"hidden_act": "gelu"},
        {"position_embedding_type": "relative_key"},
        {"is_decoder": True},
        {"add_cross_attention": True},
        {"layer_norm_eps": 0.5},
        {"num_attention_heads": 1},
        {"num_attention_heads": 3},
        {"num_attention_heads": 0},
        {"num_attention_heads": -2},
        {"num_hidden_layers": 1},
        {"model_type": "no_such_model"},
    ),
}
_OTHER["roberta"] = _OTHER["bert"]
"""Another computation than that of the weights: of one text no vector stays the same."""
_SAME: dict[str, tuple[str, ...]] = {
    "llama": ("head_dim", "hidden_act", "attention_bias", "mlp_bias", "rope_parameters"),
    "bert": ("position_embedding_type", "is_decoder", "add_cross_attention"),
}
"""Keys that may be left out, as what they say is what is meant without them."""
_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "is_decoder": False,
    "position_embedding_type": "absolute", "add_cross_attention": False,
}  # fmt: skip


@law("CAP-39", model="any", since="1.2")
def check_the_config_is_computed(rig: Rig) -> None:
    """What config.json of a folder of weights, or a GGUF header, says is computed or refused.

    It is never passed over; and keys that say what is meant without them may be left out.
    """
    paths = [Path(path) for path in (rig.path, rig.encoder) if path is not None]
    tried = [_check_config(rig, path) for path in paths if decides(path)]
    tried += [_check_header(rig, path) for path in paths if is_gguf(path)]
    for path in paths:
        has_config = (path / "config.json").is_file()
        if has_config and (path / "1_Pooling").is_dir() and not decides(path):
            with copied(path) as folder:
                config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
                _check_pooling(rig, folder, config)
                tried.append(1)
    if not sum(tried):
        rig.leave("no model of the rig has a config or header that says what is computed")


def _check_others(
    rig: Rig,
    folder: Path,
    config: dict[str, Any],
    plain: Any,
    others: tuple[dict[str, Any], ...],
) -> None:
    """Each of the ``others`` is refused, or gives what neither ``plain`` nor another one is."""
    computed: list[tuple[dict[str, Any], Any]] = [({}, plain)]
    for fields in others:
        if all(name in config and config[name] == fields[name] for name in fields):
            continue
        found = _with(rig, folder, {**config, **fields})
        if found is None:
            continue
        for before, result in computed:
            if not before or before.keys() == fields.keys():
                same = np.array_equal(found, result)
                that(not same, f"{fields} in config.json gives what {before or 'its own'} gives")
        computed.append((fields, found))
        right = _reference(folder)
        if right is not None:
            gap = float(np.abs(found - right).max())
            that(gap <= rig.tolerance, f"{fields} in config.json: {gap:.3g} off the reference")


def _check_config(rig: Rig, path: Path) -> int:
    """Try the other computations of this kind of model; return how many there are."""
    with copied(path) as folder:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kind, plain = str(config.get("model_type")), _outputs(rig, folder)
        others = _OTHER.get(kind, ()) if plain is not None else ()
        _check_others(rig, folder, config, plain, others)
        if kind == "llama" and plain is not None:
            _check_small_heads(rig, folder, config)
        for name in _SAME.get(kind, ()) if others else ():
            if _is_default(config, name):
                found = _with(rig, folder, {k: v for k, v in config.items() if k != name})
                that(found is not None, f"config.json without {name} is refused")
                that(np.array_equal(found, plain), f"without {name}, something else is computed")
        if others and _is_default(config, "head_dim"):
            write(folder / "config.json", {**config, "head_dim": None})
            found = _outputs(rig, folder)
            that(found is not None, "config.json with a head_dim of null is refused")
            that(np.array_equal(found, plain), "a head_dim of null is not one left out")
        for name, value in config.items() if others else ():
            if type(value) is int:
                found = _with(rig, folder, {**config, name: str(value)})
                same = found is None or np.array_equal(found, plain)
                that(same, f"{name} of {str(value)!r}, a text, computes something else")
        _check_pooling(rig, folder, config)
        return len(others)


_POOLINGS = {
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
    "last": "pooling_mode_lasttoken",
}


def _check_pooling(rig: Rig, folder: Path, config: dict[str, Any]) -> None:
    """The pooling that an encoder's files name is its default; no known one may be refused.

    It is part of what the digest stands for, as other vectors are made by default.
    """
    file = folder / "1_Pooling" / "config.json"
    if not file.is_file():
        return
    write(folder / "config.json", config)
    announced = rig.backend in {backend.name for backend in infercore.backends()}
    opened = partial(loaded, rig) if announced else rig.open_at
    digests: dict[str, set[str]] = {kind: set() for kind in _POOLINGS}
    for said, kind in _pooling_descriptions():
        write(file, said)
        try:
            with opened(str(folder)) as model, model.new_context() as context:
                found = context.pooling_type
                digests.get(kind, set()).add(model.digest)
        except (ModelLoadError, UnsupportedFeatureError) as error:
            that(kind == "none", f"files that say {said} are refused: {error}")
            foreseen(error, f"files that say {said}")
            continue
        equal(found, kind, f"the pooling of files that say {said}")
    for one, other in itertools.combinations(digests, 2):
        both = digests[one] & digests[other]
        what = f"files that ask for the pooling {one!r} and {other!r}"
        that(not both, f"{what}: one digest; 1_Pooling/config.json belongs to `files`")


def _pooling_descriptions() -> Iterator[tuple[dict[str, Any], str]]:
    """Yield what a description says, in the old way and in the new one, and what it means.

    What is none of the three kinds, or several at once, is nothing that a context does.
    """
    for kind in _POOLINGS:
        yield {name: other == kind for other, name in _POOLINGS.items()}, kind
    yield dict.fromkeys(_POOLINGS.values(), True), "none"
    yield {"pooling_mode_max_tokens": True}, "none"
    for mode, kind in (("mean", "mean"), ("cls", "cls"), ("lasttoken", "last"), ("max", "none")):
        yield {"pooling_mode": mode}, kind


def _reference(folder: Path) -> Any:
    """Return the reference's outputs for this folder, None where it cannot compute them."""
    try:
        with load_reference_model(str(folder)) as model:
            return _computed(model, {"n_ctx": 32})
    except InferCoreError:
        return None


def _check_small_heads(rig: Rig, folder: Path, config: dict[str, Any]) -> None:
    """With heads that no block of a quantised type divides, that type is refused or right."""
    heads = config["num_attention_heads"]
    head = int(config.get("head_dim") or config["hidden_size"] // heads)
    by = max(1, head // 16)
    fewer = {"num_attention_heads": heads * by, "head_dim": head // by}
    fewer["num_key_value_heads"] = (config.get("num_key_value_heads") or heads) * by
    write(folder / "config.json", {**config, **fewer})
    exact = _outputs(rig, folder)
    _check_what_is_allowed(rig, folder)
    for fields in ({"type_k": "q8_0"}, {"type_v": "q8_0", "flash_attn": "on"}):
        found = None if exact is None else _outputs(rig, folder, **fields)
        if found is not None:
            gap, spread = float(np.abs(found - exact).max()), float(np.ptp(exact))
            that(gap <= 0.1 * spread, f"heads of {head // by} with {fields}: {gap:.3g} off")


def _check_what_is_allowed(rig: Rig, folder: Path) -> None:
    """Where a type of the cache is refused for the size of heads, what is allowed is taken."""
    try:
        opened = rig.open_at(str(folder))
    except InferCoreError:
        return
    with opened as model:
        for fields in ({"type_k": "q8_0"}, {"type_v": "q8_0", "flash_attn": "on"}):
            name = next(iter(fields))
            try:
                with contextlib.suppress(UnsupportedFeatureError):  # of whatever heads
                    model.new_context(**rig.fields(n_ctx=32, **fields)).close()
            except InvalidInputError as error:
                facts = (error.field, error.value)
                equal(facts, (name, "q8_0"), "field and value of the error")
                kinds = error.allowed if isinstance(error.allowed, (list, tuple)) else ()
                that(error.allowed, f"the refusal of {fields} says not what is allowed")
                for kind in kinds:
                    model.new_context(**rig.fields(n_ctx=32, **{**fields, name: kind})).close()


_NUMBERS = {".rope.freq_base": 500.0, "_epsilon": 0.5}


def _check_header(rig: Rig, path: Path) -> int:
    with copied(path) as copy:
        plain, n = _outputs(rig, copy), 0
        whole = copy.read_bytes()
        for key, value in gguf.read(str(copy)).metadata.items():
            other = next((x for end, x in _NUMBERS.items() if key.endswith(end)), None)
            if other is None or plain is None or not isinstance(value, float):
                continue
            copy.write_bytes(set_number(whole, key, struct.pack("<f", other)))
            found, n = _outputs(rig, copy), n + 1
            same = found is not None and np.array_equal(found, plain)
            that(not same, f"{key} of {other} in the header is neither computed nor refused")
        named = gguf_copy.read(path).other(general__name=gguf_copy.text("n" * 300))
        copy.write_bytes(named.to_bytes())
        with rig.open_at(str(copy)) as model:
            equal(model.info.metadata.get("general.name"), "n" * 300, "a long name in the header")
        copy.write_bytes(whole)
        _check_small_heads_of_header(rig, copy)
        _check_ropes_of_header(rig, path, copy)
        _check_pooling_of_header(rig, path, copy)
        return n


def _check_pooling_of_header(rig: Rig, path: Path, copy: Path) -> None:
    """The pooling that the header of an encoder names is the one that it has by default."""
    own, header = gguf_copy.read(path), gguf.read(str(path))
    if header.own("pooling_type") is None:
        return
    for value, kind in enumerate(("none", *_POOLINGS, "rank")):
        key = f"{header.architecture}__pooling_type"
        copy.write_bytes(own.other(**{key: number(UINT32, value)}).to_bytes())
        try:
            with rig.open_at(str(copy)) as model:
                ranks = "rank" in model.capabilities.pooling
                equal(ranks, kind == "rank", f"whether a model of pooling {kind!r} ranks")
                with model.new_context(n_ctx=32) as context:
                    found = context.pooling_type
        except (ModelLoadError, UnsupportedFeatureError, InvalidInputError) as error:
            foreseen(error, f"a header that names the pooling {kind!r}")
            continue
        equal(found, kind, f"the pooling of a header that names {kind!r}")


_YARN: dict[str, bytes | None] = {
    "scaling.type": gguf_copy.text("yarn"),
    "scaling.factor": number(FLOAT32, 4.0),
}
_TRAINED = "scaling.original_context_length"
_ROPES: tuple[dict[str, bytes | None], ...] = (
    {"freq_base": None},
    {"scaling.type": gguf_copy.text("linear"), "scaling.factor": number(FLOAT32, 4.0)},
    {"scale_linear": number(FLOAT32, 8.0)},
    {"scaling.factor": number(FLOAT32, 2.0), "scaling.yarn_attn_factor": number(FLOAT32, 1.5)},
    _YARN,
    *({**_YARN, _TRAINED: number(UINT32, n)} for n in (64, 3000)),
    {
        **_YARN,
        _TRAINED: number(UINT32, 32),
        "scaling.yarn_ext_factor": number(FLOAT32, 0.5),
        "scaling.yarn_beta_fast": number(FLOAT32, 1.5),
        "scaling.yarn_beta_slow": number(FLOAT32, 0.05),
    },
)


def _check_ropes_of_header(rig: Rig, path: Path, copy: Path) -> None:
    """What is told of rope with other headers computes the same when it is asked for."""
    own, header = gguf_copy.read(path), gguf.read(str(path))
    if header.own("rope.freq_base") is None or rig.encoder == str(path):
        return
    tokens, seen = rig.tokens(40), dict[str, bytes]()
    for ropes in _ROPES:
        entries = {f"{header.architecture}.rope.{key}": value for key, value in ropes.items()}
        copy.write_bytes(own.other(**entries).to_bytes())
        try:
            opened = rig.open_at(str(copy))
        except ModelLoadError as error:
            foreseen(error, f"a header with {sorted(entries)}")
            continue
        with opened as model:
            try:
                first = rig.opened(model.new_context(**rig.fields()))
            except UnsupportedFeatureError as error:
                foreseen(error, f"a header with {sorted(entries)}")
                continue
            told = {name: first.effective.get(name) for name in OF_ROPE}
            asked = {name: value for name, value in told.items() if value is not None}
            with model.new_context(**rig.fields(**asked)) as again:
                for context in (first, again):
                    context.decode(tokens)
                what = f"logits with what is told of a header with {sorted(entries)}: {told}"
                rig.near(again.logits(), first.logits(), what)
                seen[_kind_of(ropes, told)] = first.logits().tobytes()
            first.close()
    equal(len(set(seen.values())), len(seen), "different logits with other headers of rope")


def _kind_of(ropes: dict[str, bytes | None], told: dict[str, Any]) -> str:
    """Return what a header says, with the trained window that is told of it.

    Windows from 2,048 on count as one: YaRN may round what it makes of them to the same.
    """
    said = {key: value for key, value in ropes.items() if key != _TRAINED}
    return f"{said} {min(told.get('yarn_orig_ctx') or 0, 2048)}"


_HEADS = ("attention.key_length", "attention.value_length", "rope.dimension_count")


def _check_small_heads_of_header(rig: Rig, path: Path) -> None:
    """As `_check_small_heads`, of a GGUF file."""
    own, header = gguf_copy.read(path), gguf.read(str(path))
    counts = [header.own(f"attention.{name}") for name in ("head_count", "head_count_kv")]
    if header.architecture != "llama" or not all(type(n) is int for n in counts):
        return
    entries = {"head_count": counts[0] * 2, "head_count_kv": counts[1] * 2}
    changed = {f"llama.attention.{name}": number(UINT32, n) for name, n in entries.items()}
    half = header.own("embedding_length") // counts[0] // 2
    changed |= {f"llama.{key}": number(UINT32, half) for key in _HEADS if header.own(key)}
    told = {**own.entries, **changed}  # what is left out is the share of each head
    for entries in (told, {k: v for k, v in told.items() if not k.endswith(_HEADS)}):
        path.write_bytes(attrs.evolve(own, entries=entries).to_bytes())
        _check_blocks(rig, path, half)


def _check_blocks(rig: Rig, path: Path, half: int) -> None:
    exact = _outputs(rig, path)
    _check_what_is_allowed(rig, path)
    for fields in ({"type_k": "q8_0"}, {"type_v": "q8_0", "flash_attn": "on"}):
        found = None if exact is None else _outputs(rig, path, **fields)
        if found is not None:
            gap, spread = float(np.abs(found - exact).max()), float(np.ptp(exact))
            that(gap <= 0.1 * spread, f"heads of {half} with {fields}: {gap:.3g} off")


def decides(path: Path) -> bool:
    """Whether config.json alone says what a folder of safetensors computes."""
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))


def _is_default(config: dict[str, Any], name: str) -> bool:
    """Whether a config says of ``name`` what holds without it."""
    if name == "head_dim":
        return bool(config.get(name) == config["hidden_size"] // config["num_attention_heads"])
    if name == "rope_parameters":
        return config.get(name) == {"rope_theta": 10000.0, "rope_type": "default"}
    return name in config and config[name] == _DEFAULTS[name]


@contextlib.contextmanager
def copied(path: Path) -> Iterator[Path]:
    """A copy of a file or folder, what is written in it included."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / path.name
        shutil.copytree(path, copy) if path.is_dir() else shutil.copy(path, copy)
        for file in (copy, *copy.rglob("*.json")):
            file.chmod(0o700)
        yield copy


def _with(rig: Rig, folder: Path, config: dict[str, Any]) -> Any:
    told = {name: value for name, value in config.items() if value is not None}
    write(folder / "config.json", told)
    return _outputs(rig, folder)


def _outputs(rig: Rig, folder: Path, **fields: Any) -> Any:
    """Return logits or a vector of a few tokens, None where the model or its context is refused."""
    try:
        with rig.open_at(str(folder)) as model:
            return _computed(model, rig.fields(n_ctx=32, **fields))
    except InferCoreError as error:
        refused = not isinstance(error, (PluginError, SessionFatalError))
        that(refused, f"neither computed nor refused: {error}")
        return None


def _computed(model: Any, fields: dict[str, Any]) -> Any:
    """Return logits or a vector of a few tokens."""
    if model.info.has_encoder:
        kinds = [kind for kind in _POOLINGS if kind in model.capabilities.pooling]
        with model.new_context(pooling_type=kinds[0] if kinds else None) as context:
            context.encode(list(range(5, 25)))
            return np.array(context.embedding())
    with model.new_context(**fields) as context:
        context.decode(list(range(5, 25)))
        context.decode_one(25)
        return np.array(context.logits())


def write(file: Path, fields: dict[str, Any]) -> None:
    """Write ``fields`` as JSON, in place of what lies there."""
    file.unlink(missing_ok=True)
    file.write_text(json.dumps(fields), encoding="utf-8")
