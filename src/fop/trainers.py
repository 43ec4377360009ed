"""What trainers that are imported already are told about fop's optimizers.

**Saving.** A rank may keep only a part of the state, so all ranks take part in saving. Lightning
sees to this itself: it calls `consolidate_state_dict()` of optimizers that have it. Transformers
and Accelerate do not, and call no hook on all ranks before they save. So the methods by which all
ranks save get a line before their first one.

**Clipping.** Lightning refuses to clip in mixed precision, with a hint that does not fit.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

# By module, class and method, each of which is called on all ranks, and calls state_dict() on some
# of them: the optimizers it saves, and the rank on which it asks for their states (None: on all).
SAVING: dict[tuple[str, str, str], Callable[[Any], tuple[Iterable[Any], int | None]]] = {
    ("transformers.trainer", "Trainer", "_save_optimizer_and_scheduler"): lambda trainer: (
        [trainer.optimizer],
        None if trainer.args.save_on_each_node else 0,
    ),
    ("accelerate.accelerator", "Accelerator", "save_state"): lambda accelerator: (
        accelerator._optimizers,
        None,
    ),
}


def gather_where_trainers_save(kind: type) -> None:
    """Let the trainers imported so far gather the states of optimizers of this kind."""
    for method, saved_by in SAVING.items():
        _replace(*method, functools.partial(_gather_and_save, kind, saved_by))


def explain_clipping(kind: type) -> None:
    """Let Lightning, where it refuses to clip for optimizers of this kind, say what to do."""
    for package in ("lightning.pytorch", "pytorch_lightning"):
        module = f"{package}.plugins.precision.amp"
        clip = functools.partial(_clip_or_explain, kind)
        _replace(module, "MixedPrecision", "clip_gradients", clip)


def _replace(module: str, owner: str, method: str, replacement: Callable[..., Any]) -> None:
    """Have `replacement(original, self, ...)` called instead of a method, if it is imported."""
    trainer = getattr(sys.modules.get(module), owner, None)
    original = getattr(trainer, method, None)
    if original is None or hasattr(original, "replaced_by_fop"):
        return

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(original, self, *args, **kwargs)

    call.replaced_by_fop = True  # type: ignore[attr-defined]
    setattr(trainer, method, call)


def _gather_and_save(
    kind: Any, saved_by: Any, save: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any
) -> Any:
    optimizers, to = saved_by(trainer)
    for optimizer in optimizers:
        while optimizer is not None and not isinstance(optimizer, kind):
            optimizer = getattr(optimizer, "optimizer", None)  # that it wraps
        if optimizer is not None:
            optimizer.consolidate_state_dict(to)
    return save(trainer, *args, **kwargs)


def _clip_or_explain(
    kind: type, clip: Callable[..., Any], plugin: Any, optimizer: Any, *args: Any, **kwargs: Any
) -> Any:
    try:
        return clip(plugin, optimizer, *args, **kwargs)
    except RuntimeError as error:
        if not isinstance(optimizer, kind):
            raise
        raise RuntimeError(
            f"Lightning does not clip gradients of {type(optimizer).__name__} in mixed precision "
            f"by itself. Leave out precision={plugin.precision!r} and pass "
            f"plugins=ClippableMixedPrecision({plugin.precision!r}, {plugin.device!r}) to the "
            "Trainer, from fop.integrations.lightning"
        ) from error
