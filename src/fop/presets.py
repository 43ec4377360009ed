"""Settings that belong together: `fop.FOP(model, lr=0.1, **fop.presets.paper())`."""

from __future__ import annotations

from typing import Any


def paper() -> dict[str, Any]:
    """The paper's literal update: absolute damping, the loss's own backward, no KL clip."""
    return {**fixed(), "kl_clip": None, "momentum": 0.9, "fallback": "sgd"}


def fixed(kl_clip: float = 1e-3) -> dict[str, Any]:
    """Steps of a fixed size: as far as this KL divergence allows, at an absolute damping.

    No forward pass is run again, and no scalar is read by the host between refreshes.
    """
    return {"kl_clip": kl_clip, "damping": 1e-3, "fisher": "empirical", "norms": "fallback"}
