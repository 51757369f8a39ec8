"""A chat as prefix and suffix: what another last user turn would not change is stable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import attrs

from infercore.chat.answer import AnswerReader
from infercore.chat.budget import ThoughtBudget
from infercore.chat.dialect import Dialect, dialect_of
from infercore.chat.history import droppable, n_characters, n_to_drop
from infercore.chat.messages import as_row
from infercore.chat.tool_choice import call_grammar
from infercore.chat.tools import Tools
from infercore.errors import InvalidInputError, UnsupportedFeatureError
from infercore.session.control_text import ControlText
from infercore.session.tape import common_prefix
from infercore.values import checks
from infercore.values.session import Message

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infercore.chat.reasoning import ReasoningFormat
    from infercore.values.config import DecodeConfig

Reasoning = Literal["parsed", "text", "off"]

_MANY_CHARACTERS = 8  # for a token: with more a text will hardly fit
_GIVEN_APART = ("messages", "tools", "bos_token", "eos_token", "chat_template")


@attrs.frozen(kw_only=True)
class ChatRequest:
    """What `Session.chat` is asked beside the options of the decode."""

    messages: Sequence[Message | Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] = "auto"
    reasoning: Reasoning = attrs.field(
        default="parsed", validator=checks.one_of("parsed", "text", "off", optional=False)
    )
    reasoning_budget: int | None = attrs.field(default=None, validator=checks.integer(low=0))
    chat_template: str | None = None
    template_variables: Mapping[str, Any] | None = None
    parse_special: bool = attrs.field(default=False, validator=checks.boolean(optional=False))


@attrs.frozen(kw_only=True)
class Turn:
    """A rendered chat: its text, its tokens, and how much of both is stable.

    ``dropped`` are the indices of the messages that were left out for want of room.
    """

    text: str
    tokens: list[int]
    stable_text: str
    n_stable: int
    dropped: tuple[int, ...] = ()


class ChatTurn:
    """One call of `Session.chat`: how it is rendered, constrained and read back.

    ``has_form``: the answer has a response_format. It is that of the text, so a thought that the
    template has begun is closed.

    Raises `InvalidInputError` for malformed messages, tools or choices, `UnsupportedFeatureError`
    for what the template lacks; nothing is changed by then.
    """

    def __init__(
        self, tokenizer: Any, request: ChatRequest, *, add_bos: bool, has_form: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._request = request
        self._tools = None if request.tools is None else Tools(request.tools)
        self._called = _called(request.tool_choice, self._tools)
        variables = _checked(request.template_variables)
        self._dialect = _dialect(tokenizer, request.chat_template)
        if request.chat_template is not None:
            variables["chat_template"] = request.chat_template
        if request.reasoning == "off":
            variables[self._switch()] = False
        offered = self._tools is not None and request.tool_choice != "none"
        self._offered = self._tools if offered else None
        is_apart = has_form and request.reasoning == "parsed"
        self._chat = _Chat(
            tokenizer,
            self._offered.rows if self._offered else None,
            variables,
            closes=self._dialect.reasoning if is_apart else None,
            add_bos=add_bos,
            parse_special=request.parse_special,
        )

    def _switch(self) -> str:
        form = self._dialect.reasoning
        if form is None or form.switch is None:
            raise UnsupportedFeatureError(
                feature="reasoning='off'",
                hint="this model's chat template has no switch for it; use 'parsed' or 'text'",
            )
        return form.switch

    def render(self, fits: Callable[[list[int]], bool] | None = None, *, window: int = 0) -> Turn:
        """Return the chat as it is to be put into the context.

        With ``fits``, which says whether tokens have room in the ``window``, whole turns are left
        out, oldest first, until they do, or none is left that may go.
        """
        rows = _rows(self._request.messages)
        if fits is None:
            return self._turn(rows, ())
        groups = droppable(rows)

        def without(n: int) -> tuple[list[dict[str, Any]], tuple[int, ...]]:
            gone = {i for group in groups[:n] for i in group}
            return [row for i, row in enumerate(rows) if i not in gone], tuple(sorted(gone))

        n = n_to_drop(
            len(groups),
            lambda n: fits(self._chat.tokenize(without(n)[0])[1]),
            is_long=n_characters(rows) > _MANY_CHARACTERS * window,
        )
        return self._turn(*without(n))

    def _turn(self, rows: list[dict[str, Any]], dropped: tuple[int, ...]) -> Turn:
        text, tokens = self._chat.tokenize(rows)
        try:
            probe_text, probe = self._chat.tokenize(_with_other_last_user(rows))
        except InvalidInputError:  # a template that refuses the probe has no stable part to show
            probe_text, probe = "", []
        return Turn(
            text=text,
            tokens=tokens,
            stable_text=text[: _common_text(text, probe_text)],
            n_stable=common_prefix(tokens, probe),
            dropped=dropped,
        )

    def decode_config(self, config: DecodeConfig, turn: Turn) -> DecodeConfig:
        """Return ``config`` with what this chat adds to it.

        Control tokens are read as text wherever the answer is parsed, and a call that must be made
        constrains the text.
        """
        changes: dict[str, Any] = {}
        if self._is_read:
            changes["special_text"] = True
        if self._called:
            if config.response_format is not None:
                raise checks.refuse(
                    "tool_choice",
                    self._request.tool_choice,
                    "'auto' or 'none' with response_format",
                )
            thought = self._dialect.reasoning
            is_inside = thought is not None and thought.begins_inside(turn.text)
            before = f"{thought.close}\n\n" if thought is not None and is_inside else ""
            changes["response_format"] = call_grammar(
                self._dialect.tool_format, self._required, self._called, self._tokenizer, before
            )
        budget = self._budget(turn)
        if budget is not None:
            changes["processors"] = (*config.processors, budget)
        return attrs.evolve(config, **changes) if changes else config

    def _budget(self, turn: Turn) -> ThoughtBudget | None:
        limit, thought = self._request.reasoning_budget, self._dialect.reasoning
        if limit is None or self._called:
            return None
        if thought is None:
            raise UnsupportedFeatureError(
                feature="reasoning_budget", hint="this model's chat template marks no thoughts"
            )
        return ThoughtBudget(
            self._tokenizer,
            thought,
            limit,
            inside=thought.begins_inside(turn.text),
            n_prompt=len(turn.tokens),
        )

    @property
    def _required(self) -> Tools:
        if self._tools is None:
            raise checks.refuse("tool_choice", self._request.tool_choice, "'auto' without tools")
        return self._tools

    @property
    def _is_read(self) -> bool:
        return (
            self._offered is not None
            or self._dialect.headers is not None
            or (self._request.reasoning == "parsed" and self._dialect.reasoning is not None)
        )

    def reader(self, turn: Turn) -> AnswerReader | None:
        """Return what reads the answer; None where it is text and nothing else."""
        if not self._is_read:
            return None
        parsed = self._request.reasoning == "parsed"
        return AnswerReader(
            turn.text,
            reasoning=(self._dialect.reasoning if parsed else None) or self._dialect.headers,
            lead=self._dialect.call_lead,
            form=self._dialect.tool_format if self._offered is not None else None,
            tools=self._offered,
            forced=bool(self._called),
            is_control=self._is_control,
        )

    def _is_control(self, mark: str) -> bool:
        """Whether ``mark`` begins with a control token in this vocabulary."""
        tokens = self._tokenizer.encode(mark, add_special=False)
        return bool(tokens) and bool(self._tokenizer.is_control(tokens[0]))


def _dialect(tokenizer: Any, template: str | None) -> Dialect:
    template = tokenizer.chat_template if template is None else checks.check_template(template)
    if not template:
        raise UnsupportedFeatureError(
            feature="chat_template",
            hint="this model has none; give chat_template=..., or render the text yourself and use "
            "ensure_prefix",
        )
    return dialect_of(
        checks.check_text("chat_template", template),
        _text_of(tokenizer, tokenizer.bos),
        _text_of(tokenizer, tokenizer.eos),
    )


def _text_of(tokenizer: Any, token: int | None) -> str:
    return "" if token is None else tokenizer.token_bytes(token).decode("utf-8", errors="replace")


def _called(choice: Any, tools: Tools | None) -> list[str]:
    """Return the names of the tools one of which must be called; none where the model decides."""
    names = [] if tools is None else tools.names
    if isinstance(choice, Mapping):  # a tool's name, whatever that is
        function = choice.get("function")
        choice = function.get("name") if isinstance(function, Mapping) else None
    elif choice in ("auto", "none"):
        return []
    elif names and choice == "required":
        return names
    if choice in names:
        return [choice]
    raise checks.refuse("tool_choice", choice, f"'auto', 'none', 'required' or one of {names}")


def _common_text(a: str, b: str) -> int:
    differ = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differ, min(len(a), len(b)))


def _checked(variables: Mapping[str, Any] | None) -> dict[str, Any]:
    if variables is None:
        return {}
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise checks.refuse("template_variables", variables, "a mapping with names as keys")
    taken = [name for name in _GIVEN_APART if name in variables]
    if taken:
        raise checks.refuse(
            "template_variables", taken, "names other than those that the session gives itself"
        )
    return dict(variables)


def _rows(messages: Sequence[Message | Mapping[str, Any]]) -> list[dict[str, Any]]:
    allowed = "a sequence of messages that is not empty"
    if isinstance(messages, (Mapping, Message)):
        raise checks.refuse("messages", messages, allowed)
    listed = checks.items("messages", messages, allowed)
    if not listed:
        raise checks.refuse("messages", messages, allowed)
    return [as_row(message) for message in listed]


def _with_other_last_user(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same chat with another last user turn (appended where there is none)."""
    for i in range(len(rows) - 1, -1, -1):
        if rows[i]["role"] == "user":
            content = _other_content(rows[i].get("content"))
            return [*rows[:i], {**rows[i], "content": content}, *rows[i + 1 :]]
    return [*rows, {"role": "user", "content": "1"}]


def _other_content(content: Any) -> Any:
    """Another text in the same form: a text, or a list of parts."""
    if isinstance(content, (list, tuple)):
        texts = [part["text"] for part in content if isinstance(part, Mapping) and "text" in part]
        return [{"type": "text", "text": _other_content(texts[0] if texts else "")}]
    return "2" if str(content)[:1] == "1" else "1"


class _Chat:
    """Renders rows and tokenizes the result, with what is the same for each of them."""

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: dict[str, Any],
        *,
        closes: ReasoningFormat | None,
        add_bos: bool,
        parse_special: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = tools
        self._variables = variables
        self._closes = closes
        self._add_bos = add_bos
        self._parse_special = parse_special
        self._parsed: dict[str, bool] = {}

    def _render(self, rows: Any, tools: Any) -> str:
        text: str = self._tokenizer.apply_chat_template(rows, tools=tools, **self._variables)
        thought = self._closes
        if thought is not None and thought.begins_inside(text):
            return f"{text}{thought.close}\n\n"
        return text

    def tokenize(self, rows: list[dict[str, Any]]) -> tuple[str, list[int]]:
        """Return the rendered text and its ids."""
        text = self._render(rows, self._tools)
        tokens = self._ids(rows, text)
        bos = self._tokenizer.bos
        if self._add_bos and bos is not None and tokens[:1] != [bos]:
            tokens = [bos, *tokens]
        return text, tokens

    def _ids(self, rows: list[dict[str, Any]], text: str) -> list[int]:
        if not self._parse_special:
            control = ControlText(self._tokenizer, [rows, self._tools], self._parsed)
            if control.found:
                marked = self._render(control.marked(rows), control.marked(self._tools))
                return control.tokens(text, marked)
        ids: list[int] = self._tokenizer.encode(text, add_special=False)
        return ids
