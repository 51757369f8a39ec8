"""The Serve application: replicas of each model, and the HTTP front before them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from infercore.errors import InvalidInputError
from infercore.serve import ServeConfig
from infercore.serve.app import App
from infercore.serve.models import Models
from infercore.values import checks
from infercore.values.config import ModelConfig
from infercore.values.keys import keys_in
from infercore.values.pool import pool_config, served_fields
from infercore_ray.engines import PREFIX, Opening
from infercore_ray.replica import Replica
from infercore_ray.router import PrefixRouter
from infercore_ray.scaling import ByCallsAndTokens

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ray.serve import Application

_MOST_CALLS = 1_000_000  # a call that cancels never waits for others: pools bound what runs
_REPORT_S = 1.0
_TOKENS = "target_waiting_tokens"
_TARGET_TOKENS = 2048
_OF_MODEL = tuple(field.name for field in attrs.fields(ModelConfig))
_OF_SERVER = tuple(field.name for field in attrs.fields(ServeConfig))
_OF_RAY = ("num_replicas", "autoscaling_config", "ray_actor_options", "backend")


def _options(value: object, field: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise checks.refuse(field, value, "a dict")
    return dict(value)


@attrs.frozen(kw_only=True)
class _Model:
    """A model of an application: its path, the fields of its pools, and how many there are."""

    path: str
    num_replicas: int = attrs.field(default=1, validator=checks.integer(1, optional=False))
    autoscaling_config: dict[str, Any] | None = None
    ray_actor_options: dict[str, Any] = attrs.field(factory=dict)
    fields: dict[str, Any] = attrs.field(factory=dict)

    @classmethod
    def of(cls, path: object, given: Mapping[str, Any]) -> _Model:
        """Return a model from what a caller gave. Raises `InvalidInputError`."""
        fields = dict(given)
        own = {name: fields.pop(name) for name in _OF_RAY if name in fields}
        if own.get("backend") is not None:
            fields["backend"] = checks.check_text("backend", own["backend"])
        own.pop("backend", None)
        _check_pool(fields)
        if own.get("autoscaling_config") is not None:
            own["autoscaling_config"] = _scaling(own["autoscaling_config"], own, fields)
        else:
            own.pop("autoscaling_config", None)
        if "ray_actor_options" in own:
            own["ray_actor_options"] = _options(own["ray_actor_options"], "ray_actor_options")
        return cls(path=checks.check_path("path", path), fields=fields, **own)


def _check_pool(fields: Mapping[str, Any]) -> None:
    """Raise for what is no field of a pool, or cannot be one here."""
    if fields.get("isolate"):
        raise checks.refuse("isolate", fields["isolate"], "False: a replica is a process anyway")
    of_pool = {k: v for k, v in fields.items() if k not in _OF_MODEL and k != "backend"}
    pool_config(None, of_pool)
    checks.build(ModelConfig, None, {k: v for k, v in fields.items() if k in _OF_MODEL})


def _scaling(given: object, own: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return Serve's options of scaling; a replica is full with what its pool decodes at once."""
    if "num_replicas" in own:
        raise checks.refuse(
            "num_replicas", own["num_replicas"], "nothing beside autoscaling_config"
        )
    n_parallel = fields.get("n_parallel", 8)
    options = {"target_ongoing_requests": n_parallel, **_options(given, "autoscaling_config")}
    checks.check_options("autoscaling_config", options, [*AutoscalingConfig.model_fields, _TOKENS])
    if _TOKENS in options and "policy" in options:
        raise checks.refuse(_TOKENS, options[_TOKENS], "nothing beside a policy of its own")
    n_tokens = options.pop(_TOKENS, _TARGET_TOKENS)
    if not checks.is_integer(n_tokens) or n_tokens < 1:
        raise checks.refuse(_TOKENS, n_tokens, "an integer of at least 1")
    options.setdefault(
        "policy",
        {
            "policy_function": f"{ByCallsAndTokens.__module__}:{ByCallsAndTokens.__name__}",
            "policy_kwargs": {_TOKENS: n_tokens},
        },
    )
    try:
        AutoscalingConfig(**options)
    except (ValueError, TypeError, ImportError) as error:
        raise InvalidInputError(
            f"autoscaling_config is not one: {error}",
            field="autoscaling_config",
            value=given,
            allowed="the fields of ray.serve.config.AutoscalingConfig",
        ) from error
    return options


def build_app(
    path_or_models: Any,
    *,
    num_replicas: int = 1,
    config: ServeConfig | None = None,
    num_fronts: int = 1,
    **fields: Any,
) -> Application:
    """Return a Serve application that answers the OpenAI protocol for one model or several.

    ``path_or_models`` is a path, whose model goes by "model", or a mapping of names to paths or to
    dicts with a ``path`` and fields of their own. ``fields`` are those of a pool
    (`infercore.open_pool`) and Ray's ``ray_actor_options`` and ``autoscaling_config``, for all
    models that do not say otherwise. ``num_replicas`` replicas of each model hold a pool each;
    ``num_fronts`` replicas answer HTTP, with ``config`` (`infercore.serve.ServeConfig`).

    Raises `InvalidInputError` for a field that is none, before anything is started.
    """
    given = dict(fields)
    if "autoscaling_config" not in given or num_replicas != 1:
        given["num_replicas"] = num_replicas
    models = {name: _model(each, given) for name, each in _named(path_or_models).items()}
    built = checks.build(ServeConfig, config, {})
    if not checks.is_integer(num_fronts) or num_fronts < 1:
        raise checks.refuse("num_fronts", num_fronts, "an integer of at least 1")
    deployed = [
        _deployed(name, model).bind(model.path, served_fields(model.fields))
        for name, model in models.items()
    ]
    front = serve.deployment(
        name="front",
        num_replicas=num_fronts,
        max_ongoing_requests=_MOST_CALLS,
        ray_actor_options={"num_cpus": 0},
    )(serve.ingress(_front(tuple(models), built))())
    return front.bind(*deployed)


def _named(path_or_models: Any) -> dict[str, Any]:
    named = dict(path_or_models) if hasattr(path_or_models, "items") else {"model": path_or_models}
    if not named:
        raise checks.refuse("path_or_models", path_or_models, "at least one model")
    for name in named:
        if not isinstance(name, str) or not name or "#" in name:
            raise checks.refuse("name", name, "a str that is not empty, without '#'")
    return named


def _model(each: Any, given: Mapping[str, Any]) -> _Model:
    if not hasattr(each, "items"):
        return _Model.of(each, given)
    own = {**given, **each}
    if "autoscaling_config" in each and "num_replicas" not in each:
        own.pop("num_replicas", None)
    return _Model.of(own.pop("path", None), own)


def _deployed(name: str, model: _Model) -> Any:
    """Return the deployment of a model."""
    scaling: dict[str, Any] = {"num_replicas": model.num_replicas}
    if model.autoscaling_config is not None:
        scaling = {"autoscaling_config": model.autoscaling_config}
    routed = RequestRouterConfig(
        request_router_class=PrefixRouter, request_routing_stats_period_s=_REPORT_S
    )
    try:
        return serve.deployment(
            name=PREFIX + name,
            max_ongoing_requests=_MOST_CALLS,
            ray_actor_options=model.ray_actor_options,
            request_router_config=routed,
            **scaling,
        )(Replica)
    except (ValueError, TypeError) as error:
        raise InvalidInputError(
            f"ray_actor_options are none of Ray's: {error}",
            field="ray_actor_options",
            value=model.ray_actor_options,
            allowed="what ray.remote takes for an actor",
        ) from error


def _front(names: tuple[str, ...], config: ServeConfig) -> Callable[[], App]:
    """Return what makes the HTTP front in each of its replicas."""

    def build() -> App:
        app = serve.get_replica_context().app_name
        opens = {name: Opening(PREFIX + name, app) for name in names}
        return App(Models(opens, n_warm=config.n_warm), config)

    return build


def app_builder(args: dict[str, Any]) -> Application:
    """Return the application of a Serve YAML: ``import_path: infercore_ray:app_builder``.

    ``args`` are ``path`` or ``models``, the fields of `build_app`, and those of
    `infercore.serve.ServeConfig`; ``api_key_file`` names a file of keys, one a line. Raises
    `InvalidInputError` for any other.
    """
    given = _options(args, "args")
    models = [given.pop(name) for name in ("path", "models") if name in given]
    if len(models) != 1:
        raise checks.refuse("args", sorted(args), "either path or models")
    of_server = {name: given.pop(name) for name in _OF_SERVER if name in given}
    if "api_key_file" in given:
        path = checks.check_path("api_key_file", given.pop("api_key_file"))
        with open(path, encoding="utf-8") as file:
            of_server["api_keys"] = keys_in(file.read(), path)
    return build_app(models[0], config=checks.build(ServeConfig, None, of_server), **given)
