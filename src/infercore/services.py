"""What a model makes of the layers above its guard: samplers, sessions and pools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infercore.chat.dialect import dialect_of
from infercore.engine.model import Services
from infercore.errors import UnsupportedFeatureError
from infercore.session.base import SessionOptions
from infercore.session.session import new_session
from infercore.values import checks
from infercore.values.config import sampling_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infercore.engine.model import GuardedModel
    from infercore.protocols.public import Sampler
    from infercore.protocols.session import Session
    from infercore.protocols.spi import FloatArray
    from infercore.session.pool import SessionPool
    from infercore.values.config import DecodeConfig, SamplingConfig
    from infercore.values.pool import PoolConfig


def _new_sampler(model: GuardedModel, config: SamplingConfig) -> Sampler:
    from infercore.sampling import top  # noqa: PLC0415
    from infercore.sampling.factory import new_portable_sampler  # noqa: PLC0415

    if _is_native(model, config):
        return model.new_native_sampler(config)
    kinds = model.capabilities
    if kinds.logits == "top":
        top.check_sampling(config, kinds.n_top, model.backend)
    return new_portable_sampler(
        config, model.tokenizer, model.tokenizer.n_vocab, are_logprobs=kinds.logits == "top"
    )


def _is_native(model: GuardedModel, config: SamplingConfig) -> bool:
    """Whether the engine chooses tokens: asked for, or because it alone has the logits."""
    if model.capabilities.logits != "none":
        return config.implementation == "native"
    if config.implementation == "portable":
        hint = "the engine generates by itself and shows no logits; leave it out"
        raise UnsupportedFeatureError(
            feature="implementation='portable'", backend=model.backend, hint=hint
        )
    return True


def _no_such_sampler(model: GuardedModel) -> str:
    if model.capabilities.logits == "none":
        return "the engine chooses tokens by itself, without it"
    return "the engine's own sampler has none; use implementation='portable'"


def _new_session(model: GuardedModel, context: Any, options: dict[str, Any]) -> Session:
    def sampler(config: DecodeConfig) -> Sampler:
        return _decode_sampler(model, config)

    return new_session(model, context, sampler, checks.build(SessionOptions, None, options))


def _new_pool(model: GuardedModel, config: PoolConfig, owns_model: bool) -> SessionPool:  # noqa: FBT001
    from infercore.embedding import check_opens  # noqa: PLC0415  (imports NumPy)
    from infercore.session.pool import SessionPool  # noqa: PLC0415  (imports NumPy)

    if model.capabilities.encoder:  # no context stays open, whose fields would be checked
        check_opens(model, config.context)
    return SessionPool(
        model,
        config,
        new_sampler=lambda decode: _decode_sampler(model, decode),
        embed=lambda *of: _embed_for_pool(config, *of),
        owns_model=owns_model,
    )


def _embed_for_pool(
    config: PoolConfig, model: Any, texts: Sequence[Any], pooling: str | None
) -> FloatArray:
    from infercore.embedding import embed_texts, fields_of  # noqa: PLC0415  (imports NumPy)

    context = config.context
    n_ctx = context.n_ctx if model.capabilities.encoder else None  # else it is a session's
    return embed_texts(
        model, texts, fields_of(context), pooling=pooling, normalize=False, n_ctx=n_ctx or 0
    )


def _decode_sampler(model: GuardedModel, config: DecodeConfig) -> Sampler:
    from infercore.sampling import top  # noqa: PLC0415
    from infercore.sampling.factory import new_portable_sampler  # noqa: PLC0415

    sampling = sampling_of(config)
    if _is_native(model, sampling):
        for field in ("response_format", "processors", "logprobs", "min_tokens"):
            if getattr(config, field) not in (None, (), 0):
                raise UnsupportedFeatureError(
                    feature=field,
                    backend=model.backend,
                    hint=_no_such_sampler(model),
                )
        return model.new_native_sampler(sampling)
    kinds = model.capabilities
    if kinds.logits == "top":
        top.check_sampling(sampling, kinds.n_top, model.backend)
        top.check_decode(config, kinds.n_top, model.backend)
    return new_portable_sampler(
        sampling,
        model.tokenizer,
        model.tokenizer.n_vocab,
        response_format=config.response_format,
        processors=config.processors,
        logprobs=config.logprobs is not None,
        min_tokens=config.min_tokens,
        stop_tokens=config.stop_tokens,
        are_logprobs=kinds.logits == "top",
    )


SERVICES = Services(
    new_sampler=_new_sampler, new_session=_new_session, new_pool=_new_pool, dialect=dialect_of
)
