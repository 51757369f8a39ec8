"""The base of option types of our own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    ParamType = click.ParamType
else:

    class ParamType(click.ParamType):
        """`click.ParamType`, which takes the type of its values only from click 8.4 on."""

        def __class_getitem__(cls, _: Any) -> type:
            return cls
