"""What config.json says of a model, in the words of `ModelInfo`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infercore import InvalidInputError, ModelInfo

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infercore import ContextConfig
    from infercore_openvino.files import ModelFiles
    from infercore_openvino.graph import Shape


DEFAULT_N_CTX = 4096


# Of these, positions begin behind the id of the padding.
_PADDED = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "data2vec-text", "mpnet")
# The names of one fact in the configs of different architectures.
_N_LAYER = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_N_HEAD = ("num_attention_heads", "n_head", "n_heads", "attention_heads", "num_heads")
_WINDOW = ("sliding_window", "window_size", "attention_chunk_size")
_NARROW = {"sliding_attention", "chunked_attention"}  # kinds of layers
_N_CTX = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def n_layer(config: Mapping[str, Any]) -> int:
    """Return the number of layers, 0 where the config does not say."""
    return _first(config, _N_LAYER)


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    return next((n for name in names if (n := whole(config, name))), 0)


def whole(config: Mapping[str, Any], name: str) -> int:
    """Return a number of the config, 0 where it states none."""
    value = config.get(name)
    return value if type(value) is int and value > 0 else 0


def n_ctx_train(config: Mapping[str, Any]) -> int:
    """Return the trained window in tokens, 0 where the config does not say."""
    return _first(config, _N_CTX)


def trained_window(files: ModelFiles) -> int:
    """Return `n_ctx_train`; of an encoder no more than its tokenizer gives it.

    Some encoders have positions that no text can use, as padding starts to count at its own id.
    """
    trained = n_ctx_train(files.config)
    if files.has_cache:
        return trained
    if files.config.get("model_type") in _PADDED:
        padding = files.config.get("pad_token_id")
        trained = max(0, trained - 1 - (padding if type(padding) is int else 1))
    usable = whole(files.tokenizer, "model_max_length")
    return min(trained, usable) if usable else trained


def asked_window(config: ContextConfig, files: ModelFiles) -> int:
    """Return the window that ``config`` asks for, as the core resolves it.

    Raises `InvalidInputError` for the trained window of a model that does not state it.
    """
    trained = trained_window(files)
    if config.n_ctx is None:
        return min(trained, DEFAULT_N_CTX) if trained else DEFAULT_N_CTX
    if not config.n_ctx and not trained:
        raise InvalidInputError(
            "n_ctx=0 asks for the trained window, but this model does not state one; give a number",
            field="n_ctx",
            value=0,
            allowed="at least 1",
        )
    return config.n_ctx or trained


def sliding_window(config: Mapping[str, Any]) -> int | None:
    """Return the width of sliding-window layers, None where there are none."""
    if config.get("use_sliding_window") is False:
        return None
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and not _NARROW & set(map(str, kinds)):
        return None
    return _first(config, _WINDOW) or None


def _n_head_kv(files: ModelFiles) -> int:
    """Return the heads of a state of keys, which has them and their size; else what is stated."""
    sizes = files.keys[0] if files.has_keys else ()
    return sizes[0] if len(sizes) > 1 else whole(files.config, "num_key_value_heads")


def model_info(files: ModelFiles, shape: Shape) -> ModelInfo:
    """Return the facts of config.json and of the graph."""
    config = files.config
    n_head = _first(config, _N_HEAD)
    architecture = str(config.get("model_type") or "unknown")
    simple = (str, int, float, bool)
    generation = {f"generation_config.{name}": v for name, v in files.generation.items()}
    said = {**config, **generation}
    return ModelInfo(
        architecture=architecture,
        n_vocab=shape.n_vocab,
        n_ctx_train=trained_window(files),
        n_embd=shape.n_embd,
        n_layer=shape.n_layer,
        n_head=n_head,
        n_head_kv=_n_head_kv(files) or n_head,
        n_params=shape.n_params,
        size_bytes=files.weights_bytes,
        sliding_window=sliding_window(config),
        is_recurrent=files.is_recurrent and not files.has_keys,
        is_hybrid=files.is_recurrent and files.has_keys,
        has_encoder=not files.has_cache,
        description=f"{architecture}, {shape.n_params / 1e6:.1f} M parameters, OpenVINO IR",
        metadata={name: str(v) for name, v in said.items() if isinstance(v, simple)},
    )
