"""The command ``infercore``."""

from __future__ import annotations

import sys
from typing import Any

from infercore.values import install

NEEDED = ("click", "psutil", "rich")
EXIT_NOT_INSTALLED = 2


def main(*args: Any, **fields: Any) -> Any:
    """Run the command line. Exit status 2 where the extra ``cli`` is not installed."""
    try:
        from infercore.cli.app import main as group  # noqa: PLC0415  (the extra)
    except ModuleNotFoundError as error:
        if error.name not in NEEDED:
            raise
        how = install.of_extra("cli")
        sys.stderr.write(f"error: the command line needs the package {error.name}; run: {how}\n")
        raise SystemExit(EXIT_NOT_INSTALLED) from None
    return group(*args, **fields)
