"""Texts in, one vector or score for each out, in as few engine calls as a model's limits allow."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

import attrs
import numpy as np

from infercore.errors import InvalidInputError, UnsupportedFeatureError
from infercore.session.ranking import RANK, Pair, best_first, check_ranks, check_texts, pairs_of
from infercore.values import checks
from infercore.values.config import ContextConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from infercore.protocols.public import Context, Model
    from infercore.protocols.spi import FloatArray

    Tokens = list[int]

Pooling = Literal["mean", "cls", "last", "rank"]
POOLING = ("mean", "cls", "last", RANK)
DECIDED = (
    "n_ctx", "n_batch", "n_ubatch", "n_seq_max", "kv_unified", "pooling_type", "embeddings",
    "on_oom", "n_ctx_min",
)  # fmt: skip
_TOKENS_OF_CALL = 2048
_SEQUENCES_OF_CALL = 32
_SMALL_WINDOW = 64


def rank_documents(
    model: Model, query: str, documents: Sequence[str], fields: Mapping[str, Any], top_n: int | None
) -> list[tuple[int, float]]:
    """Return place and score of ``documents``, the best first; see `infercore.rerank`."""
    pairs = pairs_of(query, documents, top_n)
    check_ranks(model)
    return best_first(embed_texts(model, pairs, fields, pooling=RANK, normalize=False), top_n)


def embed_texts(
    model: Model,
    texts: Sequence[str | Pair],
    fields: Mapping[str, Any],
    *,
    pooling: str | None,
    normalize: bool,
    n_ctx: int = 0,
) -> FloatArray:
    """Return the vectors [n_texts, n_embd] of ``texts`` or pairs; see `infercore.embed`.

    A text of more than ``n_ctx`` tokens is refused; 0 stands for what the model has learned.
    """
    _check_fields(fields)
    if pooling is not None and not (isinstance(pooling, str) and pooling in POOLING):
        raise checks.refuse("pooling", pooling, f"one of {', '.join(POOLING)}, or None")
    if pooling == RANK and RANK not in model.capabilities.pooling:
        raise InvalidInputError(
            "this model has no head that ranks texts; give another pooling, or a model that has",
            field="pooling",
            value=pooling,
            allowed=tuple(name for name in model.capabilities.pooling if name in POOLING),
        )
    if not isinstance(normalize, bool):
        raise checks.refuse("normalize", normalize, "True or False")
    prompts = [_encode(model, text, i, n_ctx) for i, text in enumerate(check_texts(texts))]
    if not prompts:
        return np.empty((0, model.info.n_embd), dtype=np.float32)
    with _open(model, prompts, pooling, fields) as context:
        vectors = np.stack(list(_evaluate(context, prompts)))
        scores = context.pooling_type == RANK
    return _unit(vectors) if normalize and not scores else vectors


def fields_of(config: ContextConfig) -> dict[str, Any]:
    """Return the fields that ``config`` sets, but for those that follow from the texts."""
    given = {
        field.name: getattr(config, field.name)
        for field in attrs.fields(ContextConfig)
        if field.name not in DECIDED
    }
    return {name: value for name, value in given.items() if value not in (None, (), {})}


def check_opens(model: Model, config: ContextConfig) -> None:
    """Raise what opening a context with the fields of ``config`` raises, where it sets any.

    ``n_ctx`` is the longest text; what else follows from the texts is refused.
    """
    fields, default = fields_of(config), ContextConfig()
    for name in DECIDED:
        if name != "n_ctx" and getattr(config, name) != getattr(default, name):
            raise _chosen(name, getattr(config, name))
    if fields:
        model.new_context(n_ctx=_SMALL_WINDOW, embeddings=True, **fields).close()


def _check_fields(fields: Mapping[str, Any]) -> None:
    """Refuse what is no field of a context, and those that follow from the texts."""
    checks.build(ContextConfig, None, fields)
    for name in DECIDED:
        if name in fields:
            raise _chosen(name, fields[name])


def _chosen(name: str, value: object) -> InvalidInputError:
    return InvalidInputError(
        f"embed chooses {name} itself, so that the texts fit; leave it out",
        field=name,
        value=value,
        allowed="nothing",
    )


def _encode_pair(model: Model, pair: Pair) -> Tokens:
    """Return the tokens of a pair as its model was trained on them, as llama.cpp's server has it.

    By the template for it that the file has, else both texts apart, each with its end.
    """
    encode, metadata = model.tokenizer.encode, model.info.metadata
    template = metadata.get("tokenizer.chat_template.rerank")
    if template:
        parts = re.split(r"(\{query\}|\{document\})", template)
        given = {"{query}": pair.query, "{document}": pair.document}
        return [
            token
            for part in parts
            if part
            for token in encode(
                given.get(part, part), add_special=False, parse_special=part not in given
            )
        ]
    texts = [(pair.query, pair.document)]
    return model.tokenizer.encode_many(texts, parse_special=False)[0]


def _encode(model: Model, text: str | Pair, number: int, n_ctx: int) -> Tokens:
    tokens = _encode_pair(model, text) if isinstance(text, Pair) else model.tokenizer.encode(text)
    limit, whose = model.info.n_ctx_train, "the model has learned"
    if n_ctx and not 0 < limit < n_ctx:
        limit, whose = n_ctx, "n_ctx is"
    if not tokens or (limit > 0 and len(tokens) > limit):
        why = (
            f"it has {len(tokens)} tokens, and {whose} {limit}; split it"
            if tokens
            else "it has no tokens"
        )
        raise InvalidInputError(
            f"text {number} cannot be embedded: {why}",
            field="texts",
            value=number,
            allowed=f"texts of 1 to {limit} tokens",
        )
    return tokens


def _open(
    model: Model, prompts: Sequence[Tokens], pooling: str | None, fields: Mapping[str, Any]
) -> Context:
    """Return a context in which the longest of ``prompts`` fits one compute step."""
    size, n_seq = _sizes(model, prompts)
    asked: dict[str, Any] = {
        "n_batch": size, "n_ubatch": size, "n_seq_max": n_seq, "pooling_type": pooling,
        "embeddings": True, **fields,
    }  # fmt: skip
    context = _opened(model, size, n_seq, asked)
    if context.pooling_type not in POOLING:
        found = context.pooling_type
        offered = [name for name in context.capabilities.pooling if name in POOLING]
        context.close()
        raise InvalidInputError(
            f"this model's own pooling is {found!r}, which gives no vector for a text; name one "
            f"with pooling: {', '.join(offered) or 'it offers none'}",
            field="pooling",
            value=pooling,
            allowed=tuple(offered),
        )
    return context


def _opened(model: Model, size: int, n_seq: int, asked: dict[str, Any]) -> Context:
    """Return a context with a window of ``size`` for all sequences together.

    Where each sequence has a cache of its own, every one gets a window of that size.
    """
    if n_seq == 1:
        return model.new_context(n_ctx=size, **asked)
    try:
        return model.new_context(n_ctx=size, kv_unified=True, **asked)
    except UnsupportedFeatureError as error:
        if "kv_unified" not in error.feature:
            raise
        return model.new_context(n_ctx=size * n_seq, **asked)


def _sizes(model: Model, prompts: Sequence[Tokens]) -> tuple[int, int]:
    """Return the tokens and the sequences of one call; the second divides the first."""
    longest, trained = max(map(len, prompts)), model.info.n_ctx_train
    usual = min(_TOKENS_OF_CALL, trained) if trained > 0 else _TOKENS_OF_CALL
    size = max(min(usual, sum(map(len, prompts))), longest)
    if not model.capabilities.multi_sequence:
        return size, 1
    n_seq = min(len(prompts), _SEQUENCES_OF_CALL)
    even = -(-size // n_seq) * n_seq
    if 0 < trained < even:  # no further than the positions that were learned
        even = trained // n_seq * n_seq
    return (even, n_seq) if even >= longest else (size, 1)


def _evaluate(context: Context, prompts: Sequence[Tokens]) -> Iterator[FloatArray]:
    """Yield the vector of each prompt, in order."""
    for group in _groups(prompts, context.n_ubatch, context.n_seq_max):
        context.clear()
        if len(group) > 1:
            entries = [(token, (i,), False) for i, tokens in enumerate(group) for token in tokens]
            context.decode_batch(entries)
        elif context.capabilities.encoder:
            context.encode(group[0])
        else:
            context.decode(group[0], logits="none")
        for i in range(len(group)):
            yield context.embedding(i).copy()


def _groups(prompts: Sequence[Tokens], n_tokens: int, n_prompts: int) -> Iterator[list[Tokens]]:
    """Cut ``prompts`` into runs that one engine call takes."""
    group: list[Tokens] = []
    room = n_tokens
    for tokens in prompts:
        if group and (len(tokens) > room or len(group) == n_prompts):
            yield group
            group, room = [], n_tokens
        group.append(tokens)
        room -= len(tokens)
    yield group


def _unit(vectors: FloatArray) -> FloatArray:
    """Return ``vectors`` with a length of 1 each; those of length 0 stay."""
    lengths = np.sqrt(np.square(vectors).sum(axis=1, keepdims=True))
    lengths[lengths == 0] = 1
    unit: FloatArray = vectors / lengths
    return unit
