"""The machinery is tested with steps of a fixed size, against references that have none other.

Steps that size themselves, which are the default, have tests of their own: they undo this by
`tests.common.library_defaults`.
"""

from __future__ import annotations

from typing import Any

import fop

FIXED = fop.presets.fixed()
LIBRARY: dict[type, dict[str, Any]] = {}

for _optimizer in (fop.FOP, fop.KFAC):
    _defaults = _optimizer.__init__.__kwdefaults__
    LIBRARY[_optimizer] = dict(_defaults)
    _defaults.update(FIXED)
