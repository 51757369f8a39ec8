"""`AsyncSession.run_tools`: what the sync one does, awaited."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, Literal

import pytest

import infercore as ic

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER = {"role": "user", "content": "How is the weather in Rome?"}
FIELDS: dict[str, Any] = {
    "max_rounds": 1, "chat_template": TEMPLATE, "tool_choice": "required",
    "max_tokens": 60, "temperature": 0,
}  # fmt: skip
City = Literal["Rome", "Oslo"]


def weather(city: City) -> str:
    """The weather in a city."""
    return f"sun, {threading.current_thread() is threading.main_thread()}"


async def ask(session: Any, *functions: Any) -> list[ic.Message]:
    return await session.run_tools([USER], functions, **FIELDS)


def test_it_says_what_the_sync_one_says(model: Any, exact: Any) -> None:
    async def main() -> list[list[ic.Message]]:
        async with await ic.aopen_session(model, n_ctx=512, **exact) as alone:
            first = await ask(alone, weather)
        async with (
            ic.aopen_pool(model, n_ctx=512, n_parallel=2, **exact) as pool,
            await pool.aopen_session() as a,
            await pool.aopen_session() as b,
        ):
            return [first, *await asyncio.gather(ask(a, weather), ask(b, weather))]

    with model.new_session(n_ctx=512, **exact) as session:
        expected = session.run_tools([USER], [weather], **FIELDS)
    assert [m.role for m in expected] == ["assistant", "tool", "assistant"]
    for came in asyncio.run(main()):
        assert came[0].tool_calls[0].arguments == expected[0].tool_calls[0].arguments
        assert [m.role for m in came] == [m.role for m in expected]
        assert came[1].content == "sun, False"  # a plain function holds up no other task


def test_coroutine_functions_are_awaited_and_faults_go_to_the_model(model: Any) -> None:
    async def forecast(city: City) -> dict[str, str]:
        """The weather in a city."""
        await asyncio.sleep(0)
        return {"city": city}

    async def broken(city: City) -> str:
        """The weather in a city."""
        raise OSError("no network")

    async def main() -> list[Any]:
        async with await ic.aopen_session(model, n_ctx=512) as session:
            good, bad = await ask(session, forecast), await ask(session, broken)
            with pytest.raises(ic.InvalidInputError):
                await ask(session)
            return [good[1].content, bad[1].content]

    good, bad = asyncio.run(main())
    assert good in ('{"city": "Rome"}', '{"city": "Oslo"}')
    assert bad == '{"error": "OSError: no network"}'
    with model.new_session(n_ctx=512) as session, pytest.raises(ic.InvalidInputError) as caught:
        session.run_tools([USER], [forecast], **FIELDS)
    assert "AsyncSession" in str(caught.value)
