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
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# Of a trainer: its optimizers, and the rank on which it asks for their states (None: on all).
Saved = tuple[Iterable[Any], int | None]


def _saved_by_trainer(trainer: Any) -> Saved:
    return [trainer.optimizer], None if trainer.args.save_on_each_node else 0


def _saved_by_accelerator(accelerator: Any) -> Saved:
    return accelerator._optimizers, None


# By module, class and method. Each is called on all ranks, and calls state_dict() on some of them.
SAVING: dict[tuple[str, str, str], Callable[[Any], Saved]] = {
    ("transformers.trainer", "Trainer", "_save_optimizer_and_scheduler"): _saved_by_trainer,
    ("accelerate.accelerator", "Accelerator", "save_state"): _saved_by_accelerator,
}


def gather_where_trainers_save(kind: type) -> None:
    """Let the trainers imported so far gather the states of optimizers of this kind."""
    for (module, owner, method), saved_by in SAVING.items():
        trainer = getattr(sys.modules.get(module), owner, None)
        save = getattr(trainer, method, None)
        if save is not None and not hasattr(save, "gathers_for_fop"):
            setattr(trainer, method, _gathering_first(save, saved_by, kind))


def _gathering_first(
    save: Callable[..., Any], saved_by: Callable[[Any], Saved], kind: type
) -> Callable[..., Any]:
    @functools.wraps(save)
    def gather_and_save(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        optimizers, to = saved_by(trainer)
        for wrapped in optimizers:
            for optimizer in _layers_of(wrapped):
                if isinstance(optimizer, kind):
                    optimizer.consolidate_state_dict(to)  # type: ignore[attr-defined]
                    break
        return save(trainer, *args, **kwargs)

    gather_and_save.gathers_for_fop = True  # type: ignore[attr-defined]
    return gather_and_save


CLIPPING = "plugins.precision.amp", "MixedPrecision", "clip_gradients"


def explain_clipping(kind: type) -> None:
    """Let Lightning, where it refuses to clip for optimizers of this kind, say what to do."""
    module, owner, method = CLIPPING
    for package in ("lightning.pytorch", "pytorch_lightning"):
        plugin = getattr(sys.modules.get(f"{package}.{module}"), owner, None)
        clip = getattr(plugin, method, None)
        if clip is not None and not hasattr(clip, "explains_for_fop"):
            setattr(plugin, method, _explaining(clip, kind))


def _explaining(clip: Callable[..., Any], kind: type) -> Callable[..., Any]:
    @functools.wraps(clip)
    def clip_or_explain(plugin: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return clip(plugin, optimizer, *args, **kwargs)
        except RuntimeError as error:
            if not isinstance(optimizer, kind):
                raise
            raise RuntimeError(
                f"Lightning does not clip gradients of {type(optimizer).__name__} in mixed "
                f"precision by itself. Leave out precision={plugin.precision!r} and pass "
                f"plugins=ClippableMixedPrecision({plugin.precision!r}, {plugin.device!r}) to the "
                "Trainer, from fop.integrations.lightning"
            ) from error

    clip_or_explain.explains_for_fop = True  # type: ignore[attr-defined]
    return clip_or_explain


def _layers_of(optimizer: Any) -> Iterator[Any]:
    """An optimizer, and what it wraps."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "optimizer", None)
