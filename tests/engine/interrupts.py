"""A Ctrl-C at a place of one's choice."""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def interrupt(n: int, call: Callable[[], object], within: str | tuple[str, ...]) -> bool:
    """Run ``call`` with a Ctrl-C at the ``n``-th place of ``within`` where Python looks for one.

    ``within`` is the beginning of the names of source files. The places are the starts of functions
    and what comes behind a call of C. Return whether there was such a place.
    """
    places = itertools.count(1)

    def look(frame: Any, event: str, _: object) -> None:
        ours = event in {"call", "c_return"} and frame.f_code.co_filename.startswith(within)
        if ours and next(places) == n:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False
