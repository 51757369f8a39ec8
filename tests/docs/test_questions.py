"""Each question that people ask has an answer, two clicks away at most, with blocks that run."""

from __future__ import annotations

import runpy

import pytest

from docs import pages

if not pages.DOCS.is_dir():
    pytest.skip("the documentation is not beside these tests", allow_module_level=True)

TOOL = runpy.run_path(str(pages.ROOT / "tools" / "questions.py"))
ANSWERS = TOOL["answers"]()
AWAY = TOOL["clicks"]()
# Words that newcomers type into the search, and that no page had.
SEARCHED = (
    "RAG", "agent", "FastAPI", "web server", "several users", "error", "long conversation",
    "quantized KV cache", "system prompt", "seed", "stop strings", "count tokens", "uninstall",
    "caches", "macOS", "licence", "container", "prompt caching", "save a conversation",
)  # fmt: skip


def test_there_are_thirty_questions():
    assert len(ANSWERS) >= 30
    assert len({answer.question for answer in ANSWERS}) == len(ANSWERS)


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.question)
def test_an_answer_is_two_clicks_away_and_has_blocks_that_run(answer):
    assert AWAY[answer.page] <= 2
    assert answer.blocks, f"{answer.page}#{answer.anchor} has nothing that is run"


@pytest.mark.parametrize("words", SEARCHED)
def test_titles_and_questions_have_the_words_that_people_type(words):
    """The search gives most weight to titles."""
    titles = [
        line.lstrip("# ")
        for page in pages.pages()
        for line in pages.text_of(page).splitlines()
        if line.startswith("#")
    ]
    said = [*titles, *(answer.question for answer in ANSWERS)]
    assert [text for text in said if words.lower() in text.lower()]
