"""What people type into the search finds its page: else the build warns, which is an error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sphinx.util import logging

if TYPE_CHECKING:
    from sphinx.application import Sphinx

PAGE_OF = {
    "RAG": "how-to/rag",
    "agents": "how-to/agents",
    "web server": "how-to/serve",
    "several users": "how-to/pools",
    "multiple users": "how-to/pools",
    "errors": "reference/errors",
    "error handling": "how-to/everyday",
    "long conversation": "how-to/chat",
    "convert model": "how-to/get-a-model",
    "fastapi": "how-to/async-server",
    "system prompt": "how-to/everyday",
    "seed": "how-to/everyday",
    "quantized kv cache": "how-to/everyday",
    "cache directory": "how-to/everyday",
    "macos": "how-to/everyday",
    "license": "how-to/everyday",
    "uninstall": "how-to/everyday",
    "count tokens": "how-to/everyday",
    "stop strings": "how-to/everyday",
    "docker": "how-to/containers",
}
"""Words that people type, and the page that they want."""


def look(app: Sphinx, error: Exception | None) -> None:
    """Warn about words whose page the site's own index does not have for all of them."""
    indexer = getattr(app.builder, "indexer", None)
    if error is not None or indexer is None:
        return
    for words, page in PAGE_OF.items():
        for word in words.split():
            term = indexer.lang.stem(word.lower())
            found = set(indexer._mapping.get(term, ()))  # noqa: SLF001  (Sphinx has no other way)
            found.update(indexer._title_mapping.get(term, ()))  # noqa: SLF001
            if page not in found:
                logging.getLogger(__name__).warning("the search for %r misses %s", words, page)


def setup(app: Sphinx) -> dict[str, bool]:
    """Tell Sphinx of the check."""
    app.connect("build-finished", look)
    return {"parallel_read_safe": True}
