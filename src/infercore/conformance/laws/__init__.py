"""The laws, a module for each group or two.

The package has the name of the function `infercore.conformance.laws`, which an import of the
package hides; so the package can be called as the function can.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infercore.conformance.law import Law


class _Laws(ModuleType):
    def __call__(self) -> tuple[Law, ...]:
        from infercore.conformance import registry  # noqa: PLC0415  (it imports this package)

        return registry.laws()


sys.modules[__name__].__class__ = _Laws
