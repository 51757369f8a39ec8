"""Options that mirror the fields of the configs: same name, same meaning, none left out."""

from __future__ import annotations

import functools
import json
import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import attrs
import click

from infercore.errors import InvalidInputError
from infercore.locating import settings
from infercore.locating.locate import is_model
from infercore.values import field_texts
from infercore.values.config import (
    POOLING_TYPES,
    PRECISIONS,
    ROPE_SCALING_TYPES,
    AdapterSpec,
    ContextConfig,
    KVType,
    ModelConfig,
    SamplingConfig,
)
from infercore.values.pool import SERVED, PoolConfig
from infercore.values.recommended import RECOMMENDED

if TYPE_CHECKING:
    from collections.abc import Mapping


if TYPE_CHECKING:
    ParamType = click.ParamType
else:

    class ParamType(click.ParamType):
        """`click.ParamType`, which takes the type of its values only from click 8.4 on."""

        def __class_getitem__(cls, _: Any) -> type:
            return cls


@attrs.frozen
class Row:
    """Other names of a field's option, what it accepts, and help where it has its own.

    What a field means stands in ``field_texts``; ``default`` is the command's where it has its own.
    """

    help: str = ""
    also: tuple[str, ...] = ()
    choices: tuple[object, ...] = ()
    metavar: str | None = None
    param_type: str = ""
    multiple: bool = False
    default: Any = None


MODEL: Mapping[str, Row] = MappingProxyType({
    "device": Row("A device of the backend; see infercore backends --devices.", metavar="NAME"),
    "n_gpu_layers": Row(also=("-ngl", "--gpu-layers"), metavar="N"),
    "main_gpu": Row(metavar="N"),
    "split_mode": Row(choices=("none", "layer", "row")),
    "tensor_split": Row(metavar="X,Y,...", param_type="numbers"),
    "use_mmap": Row(),
    "use_mlock": Row(),
    "check_tensors": Row(),
    "check_in_child": Row(),
})  # fmt: skip

CONTEXT: Mapping[str, Row] = MappingProxyType({
    "n_ctx": Row(also=("-c", "--ctx-size"), metavar="N", param_type="window"),
    "n_threads": Row(also=("-t", "--threads"), metavar="N"),
    "n_threads_batch": Row(also=("--threads-batch",), metavar="N"),
    "n_batch": Row(also=("-b", "--batch-size"), metavar="N"),
    "n_ubatch": Row(also=("-ub", "--ubatch-size"), metavar="N"),
    "n_seq_max": Row(metavar="N"),
    "type_k": Row(
        "Number format of the keys in the KV cache; infercore inspect lists the model's.",
        metavar="TYPE", param_type="kv_type",
    ),
    "type_v": Row(
        "Number format of the values in the KV cache; infercore inspect lists the model's.",
        metavar="TYPE", param_type="kv_type",
    ),
    "flash_attn": Row(also=("-fa",), choices=("auto", "on", "off")),
    "precision": Row(choices=PRECISIONS),
    "swa_full": Row(),
    "kv_unified": Row(),
    "offload_kqv": Row(),
    "op_offload": Row(),
    "on_oom": Row(choices=("raise", "shrink")),
    "n_ctx_min": Row(metavar="N"),
    "pooling_type": Row(choices=POOLING_TYPES),
    "rope_scaling_type": Row(choices=ROPE_SCALING_TYPES),
    "rope_freq_base": Row(metavar="X"),
    "rope_freq_scale": Row(metavar="X"),
    "yarn_ext_factor": Row(metavar="X"),
    "yarn_attn_factor": Row(metavar="X"),
    "yarn_beta_fast": Row(metavar="X"),
    "yarn_beta_slow": Row(metavar="X"),
    "yarn_orig_ctx": Row(metavar="N"),
})  # fmt: skip

SAMPLING: Mapping[str, Row] = MappingProxyType({
    "temperature": Row(also=("--temp",), metavar="X"),
    "top_k": Row(metavar="K"),
    "top_p": Row(metavar="P"),
    "min_p": Row(metavar="P"),
    "typical_p": Row(metavar="P"),
    "top_n_sigma": Row(metavar="N"),
    "xtc_probability": Row(metavar="P"),
    "xtc_threshold": Row(metavar="P"),
    "dynatemp_range": Row(metavar="X"),
    "dynatemp_exponent": Row(metavar="X"),
    "mirostat": Row(choices=(0, 1, 2)),
    "mirostat_tau": Row(metavar="X"),
    "mirostat_eta": Row(metavar="X"),
    "adaptive_p_target": Row(metavar="P"),
    "adaptive_p_decay": Row(metavar="X"),
    "repeat_penalty": Row(metavar="X"),
    "frequency_penalty": Row(metavar="X"),
    "presence_penalty": Row(metavar="X"),
    "penalty_last_n": Row(metavar="N"),
    "dry_multiplier": Row(metavar="X"),
    "dry_base": Row(metavar="X"),
    "dry_allowed_length": Row(metavar="N"),
    "dry_penalty_last_n": Row(metavar="N"),
    "dry_sequence_breakers": Row(
        "DRY: a text that ends a repetition; repeatable.", metavar="TEXT", multiple=True
    ),
    "logit_bias": Row(
        "Add AMOUNT to a token's logit; repeatable.",
        metavar="ID=AMOUNT", param_type="bias", multiple=True,
    ),
    "seed": Row(
        "Random seed, to get the same text again; default: a new one each time.",
        also=("-s",), metavar="N",
    ),
    "min_keep": Row(metavar="N"),
    "ignore_eos": Row(),
    "no_repeat_ngram_size": Row(metavar="N"),
    "implementation": Row(choices=("auto", "native", "portable")),
})  # fmt: skip

POOL: Mapping[str, Row] = MappingProxyType({
    "n_parallel": Row(also=("-np",), metavar="N"),
    "n_cells": Row(
        "Number of tokens that all sessions can hold together, at least --n-ctx; by default "
        "--n-parallel times that, or as many as fit in memory.", metavar="N",
    ),
    "n_step_tokens": Row(
        "Maximum number of tokens in one engine call, instead of --max-step-ms.", metavar="N",
    ),
    "max_step_ms": Row(
        "Pause of running answers to aim at while a prompt is read, in ms.", metavar="MS",
        default=SERVED["max_step_ms"],
    ),
    "max_waiting": Row("Requests that may wait for a place; one more gets 429.", metavar="N"),
    "batching": Row(choices=("auto", "always", "never"), default=SERVED["batching"]),
    "batch_invariant": Row(),
    "cache_bytes": Row(metavar="N", default=SERVED["cache_bytes"]),
    "cache_dir": Row("A folder for sessions that no longer fit in RAM.", metavar="DIR"),
    "cache_dir_bytes": Row(metavar="N"),
    "step_timeout": Row(metavar="S"),
    "load_timeout": Row(metavar="S"),
    "max_restarts": Row(metavar="N"),
    "restart_window": Row(metavar="S"),
})  # fmt: skip


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Decorator = Callable[[Any], Any]

T = TypeVar("T")
F = TypeVar("F", bound="Callable[..., Any]")

ABOUT_MODEL = (
    "A path, hf:ORG/REPO[:QUANT], pack:NAME or an alias; if omitted, the default that `infercore "
    "models default` sets."
)

_TYPES = {"int": int, "float": float, "str": str}
CONTEXT_FOR_TEXT = tuple(name for name in CONTEXT if name not in {"n_seq_max", "pooling_type"})
"""Fields of `ContextConfig` for commands that generate from one sequence."""


LONGEST_SUMMARY = 200
COMMON = frozenset({
    "n_ctx", "n_gpu_layers", "n_threads", "max_tokens", "stop", "json_schema", "temperature",
    "n_parallel", "cache_dir", "seed", "system", "named_model", "backend",
})  # fmt: skip
"""Options with a heading that ``--help`` shows too; ``--help-all`` shows all."""
_HELP_ALL = "infercore.cli.help_all"


class SectionOption(click.Option):
    """An option that the help shows under a heading of its own."""

    def __init__(self, *args: Any, section: str = "Options", **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.section = section


class WholeSummaries(click.Group):
    """A group whose help shows each command with its whole summary."""

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002  (click's signature)
        formatter: click.HelpFormatter,
    ) -> None:
        """Write each command with its whole summary."""
        with formatter.section("Commands"):
            formatter.write_dl([
                (name, command.get_short_help_str(limit=LONGEST_SUMMARY))
                for name, command in self.commands.items()
            ])  # fmt: skip


class SectionCommand(click.Command):
    """A command with a short help and examples, and one of all options under their headings."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.examples = tuple(examples)
        self.params.append(
            click.Option(
                ["--help-all"], is_flag=True, is_eager=True, expose_value=False,
                callback=_show_all, help="Show all options.",
            )
        )  # fmt: skip

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a list for each heading; the command's own options come first."""
        shows_all = ctx.meta.get(_HELP_ALL, False)
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        if any(parameter.name == "model" for parameter in self.params):
            sections["Arguments"].append(("MODEL", ABOUT_MODEL))
        left_out = 0
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None or isinstance(parameter, click.Argument):
                continue
            heading = getattr(parameter, "section", "Options")
            if shows_all or heading == "Options" or parameter.name in COMMON:
                sections.setdefault(heading, []).append(record)
            else:
                left_out += 1
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    formatter.write(f"{'':{formatter.current_indent}}{example}\n")
        if left_out:
            formatter.write_paragraph()
            formatter.write_text(f"{left_out} more options: {ctx.command_path} --help-all")


def _show_all(ctx: click.Context, _: click.Parameter, value: bool) -> None:  # noqa: FBT001
    if value and not ctx.resilient_parsing:
        ctx.meta[_HELP_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


class KeyValue(ParamType[tuple[str, Any]]):
    """``KEY=VALUE``; the value is parsed as JSON if possible."""

    name = "KEY=VALUE"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, Any]:
        """Return key and value; a usage error without ``=`` or key."""
        key, equals, text = str(value).partition("=")
        if not equals or not key:
            self.fail(f"{value!r} is not KEY=VALUE", param, ctx)
        try:
            return key, json.loads(text)
        except ValueError:
            return key, text


class Numbers(ParamType[tuple[float, ...]]):
    """Numbers with commas between them."""

    name = "X,Y,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        """Return the numbers; a usage error for anything else."""
        try:
            return tuple(float(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as 0.6,0.4", param, ctx)


class Bias(ParamType[tuple[int, float]]):
    """``ID=AMOUNT`` for one token."""

    name = "ID=AMOUNT"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, float]:
        """Return id and amount; a usage error for anything else."""
        token, _, amount = str(value).partition("=")
        try:
            return int(token), float(amount)
        except ValueError:
            self.fail(f"{value!r} is not ID=AMOUNT, such as 15=-inf", param, ctx)


class Window(ParamType["int | str"]):
    """A number of tokens, or "fit"."""

    name = "N"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        """Return it; a usage error for anything else."""
        if value == "fit":
            return "fit"
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither a number of tokens nor fit", param, ctx)


class KVTypeName(ParamType[KVType]):
    """A number format of the KV cache; the loaded model's capabilities decide which there are."""

    name = "TYPE"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> KVType:
        """Return the type; a usage error without a name."""
        try:
            return KVType(str(value))
        except InvalidInputError as error:
            self.fail(str(error), param, ctx)


_PARAM_TYPES = {"numbers": Numbers(), "bias": Bias(), "kv_type": KVTypeName(), "window": Window()}


_FIELDS = frozenset({
    *MODEL, *CONTEXT, *SAMPLING, "max_tokens", "stop", "stop_tokens", "special_text", "logprobs",
    "overflow", "chat_template", *POOL, "isolate", "n_draft", "n_gram", "pooling",
})  # fmt: skip
_FLAGS = {"chat_template": "--template", "stop_tokens": "--stop-token"}
_FIELD = re.compile(
    r"(?<![\w\-./'])(?P<name>[a-z]\w*)(?:=(?P<value>'[^']*'|\"[^\"]*\"|[^\s,;)]+))?"
)


_KV_TYPE = re.compile(r"KVType\(('\w+')\)")


def as_options(text: str) -> str:
    """Return a message of the library in the words of the command line: fields as options."""
    text = _KV_TYPE.sub(r"\1", text.replace(", or None", ""))
    text = _FIELD.sub(_as_option, text)
    text = re.sub(r"\bopen(?: it| the session)? with (a larger )?(?=--)", r"give \1", text)
    return re.sub(r"\binfercore\.(embed|generate|chat|serve)\b", r"infercore \1", text)


def _as_option(found: re.Match[str]) -> str:
    name, value = found["name"], found["value"]
    if name not in _FIELDS or (value is None and "_" not in name):
        return found[0]
    flag = _FLAGS.get(name, "--" + name.replace("_", "-"))
    return flag if value is None else f"{flag} {value.strip(chr(39) + chr(34))}"


def option(*names: str, section: str, **fields: Any) -> Decorator:
    """Return the decorator for an option under a heading."""
    return click.option(*names, cls=SectionOption, section=section, **fields)


def config_option(cls: type, name: str, row: Row, section: str) -> Decorator:
    """Return the decorator for the option of one field; not given, it is None or ()."""
    field = attrs.fields_dict(cls)[name]
    flag = "--" + name.replace("_", "-")
    kind = str(field.type).removesuffix(" | None")
    recommended = cls is SamplingConfig and name in RECOMMENDED
    meaning = row.help or field_texts.sentence(cls.__name__, name)
    default = field.default if row.default is None else row.default
    text = meaning + _default_of(default, " or the model's" if recommended else "")
    if kind == "bool":
        named = (f"{flag}/--no-{flag[2:]}",)
        return option(*named, section=section, default=None, help=text)
    names = (name, *row.also, flag)
    if row.choices:
        choice = click.Choice([str(item) for item in row.choices])
        return option(*names, section=section, type=choice, help=text)
    param_type = _PARAM_TYPES.get(row.param_type) or _TYPES.get(kind, str)
    return option(
        *names, section=section, type=param_type, metavar=row.metavar, multiple=row.multiple,
        help=text,
    )  # fmt: skip


def _default_of(default: object, more: str) -> str:
    if not isinstance(default, (bool, int, float, str)):
        return ""
    shown = {True: "on", False: "off"}[default] if isinstance(default, bool) else default
    return f" [default: {shown}{more}]"


def model_options(command: F) -> F:
    """Add MODEL with ``-m``, and `load_options`; the command gets ``model`` in any case."""
    return model_and("")(command)


def model_and(rest: str) -> Callable[[F], F]:
    """Return what adds MODEL, where arguments called ``rest`` follow it.

    With ``-m``, or a default model and a first argument that is none, all arguments are the rest.
    """

    def add(command: F) -> F:
        @functools.wraps(command)
        def with_model(*args: Any, model: str | None, named_model: str | None, **given: Any) -> Any:
            chosen, more = _model_of(model, named_model, has_rest=bool(rest))
            if more:
                given[rest] = (*more, *given[rest])
            return command(*args, model=chosen, **given)

        decorated = load_options(with_model)
        decorated = option(
            "named_model", "-m", "--model", section="Model", metavar="MODEL",
            help="The model, in place of the argument.",
        )(decorated)  # fmt: skip
        decorated = click.argument("model", metavar="[MODEL]", required=False)(decorated)
        return cast("F", decorated)

    return add


def _model_of(
    first: str | None, named: str | None, *, has_rest: bool
) -> tuple[str, tuple[str, ...]]:
    """Return the model, and the first argument where it is not the model."""
    if named is not None:
        if first is not None and not has_rest:
            raise click.UsageError(f"two models were given: {first} and, with -m, {named}")
        return named, () if first is None else (first,)
    default = settings.default_model()
    if first is None or (default is not None and has_rest and not is_model(first)):
        return default or no_model(), () if first is None else (first,)
    return first, ()


def no_model() -> NoReturn:
    """Raise the usage error for a model that is neither named nor set."""
    raise click.UsageError(
        "no model: name one, such as pack:storyteller or hf:ORG/REPO, or set a default with "
        "infercore models default MODEL"
    )


def load_options(command: T) -> T:
    """Add ``--backend``, the fields of `ModelConfig` and ``--option``."""
    for name, row in reversed(tuple(MODEL.items())):
        command = config_option(ModelConfig, name, row, "Model")(command)
    command = option(
        "backend_options", "--option", section="Model", type=KeyValue(), multiple=True,
        help="An engine-specific option of the model or context; repeatable.",
    )(command)  # fmt: skip
    decorated: T = backend_option(command)
    return decorated


def backend_option(command: T) -> T:
    """Add ``--backend``."""
    add = option(
        "--backend", section="Model", metavar="NAME", shell_complete=backend_names,
        help="The backend to use; default: INFERCORE_BACKEND, or the best match for the file.",
    )  # fmt: skip
    decorated: T = add(command)
    return decorated


def backend_names(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of backends that begin with ``incomplete``, for completion."""
    import infercore  # noqa: PLC0415  (scans the plugins only when asked)

    return [info.name for info in infercore.backends() if info.name.startswith(incomplete)]


def context_options(names: Sequence[str] = tuple(CONTEXT)) -> Decorator:
    """Return what adds the fields ``names`` of `ContextConfig`, and LoRA adapters."""

    def add(command: T) -> T:
        command = option(
            "--lora-scaled", section="Context", type=(click.Path(), float), multiple=True,
            metavar="PATH SCALE", help="A LoRA adapter with its scale; repeatable.",
        )(command)  # fmt: skip
        command = option(
            "--lora", section="Context", type=click.Path(), multiple=True, metavar="PATH",
            help="A LoRA adapter, scale 1; repeatable.",
        )(command)  # fmt: skip
        for name in reversed(names):
            command = config_option(ContextConfig, name, CONTEXT[name], "Context")(command)
        return command

    return add


def pool_options(names: Sequence[str] = tuple(POOL)) -> Decorator:
    """Return what adds the fields ``names`` of `PoolConfig`."""

    def add(command: T) -> T:
        for name in reversed(names):
            command = config_option(PoolConfig, name, POOL[name], "Pool")(command)
        return command

    return add


def sampling_options(command: T) -> T:
    """Add the fields of `SamplingConfig`."""
    for name, row in reversed(tuple(SAMPLING.items())):
        command = config_option(SamplingConfig, name, row, "Sampling")(command)
    return command


def given(cls: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``cls`` that were given as options.

    Raises `click.BadParameter` where the config refuses one.
    """
    names = [field.name for field in attrs.fields(cls) if field.name != "backend_options"]
    fields = {name: _value(name, options[name]) for name in names if _is_given(options, name)}
    if cls is ContextConfig and (adapters := _adapters(options)):
        fields["adapters"] = adapters
    checked(cls, fields)
    return fields


def checked(cls: Callable[..., T], fields: Mapping[str, Any]) -> T:
    """Return ``cls(**fields)``; what it refuses is a wrong command line."""
    try:
        return cls(**fields)
    except InvalidInputError as error:
        flag = "--" + error.field.replace("_", "-")
        raise click.BadParameter(str(error), param_hint=f"'{flag}'") from error


def _is_given(options: Mapping[str, Any], name: str) -> bool:
    value = options.get(name)
    return value is not None and value != ()


def _value(name: str, value: Any) -> Any:
    if name == "mirostat":
        return int(value)
    return dict(value) if name == "logit_bias" else value


def _adapters(options: Mapping[str, Any]) -> list[AdapterSpec]:
    plain = [AdapterSpec(path=path) for path in options.get("lora", ())]
    scaled = options.get("lora_scaled", ())
    return plain + [AdapterSpec(path=path, scale=scale) for path, scale in scaled]
