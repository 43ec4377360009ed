"""`FOP` and `KFAC`: torch.optim.Optimizer fronts of the engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fop._torch import load_hooks
from fop.capture import (
    ExtraPass,
    Recorder,
    RemovableHandles,
    hook_attention,
    hook_batch,
    hook_gradient,
    hook_module,
    hook_output,
    take_over,
)
from fop.checkpoints import STATE_FORMAT, add_consolidated, consolidate, read_state
from fop.discovery import FoundLayer, check_model, describe_modules, find_layers
from fop.distributed import GroupReference, describe, join_group
from fop.groups import build_groups
from fop.layers import ProjectionAdapter
from fop.scaling import LossScale
from fop.settings import GROUP_OPTIONS, Settings, check_group
from fop.step import Engine
from fop.trainers import explain_clipping, gather_where_trainers_save
from fop.trust import MEMORY, Outcome
from fop.update import reference_lr

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Handle = RemovableHandle | RemovableHandles


class SecondOrderOptimizer(Optimizer):
    """What `FOP` and `KFAC` share: everything but their arguments."""

    # torch.amp.GradScaler then calls step() also after an overflow, with `grad_scale` and
    # `found_inf` set, instead of reading the flag on the host.
    _step_supports_amp_scaling = True
    grad_scale: Tensor | None
    found_inf: Tensor

    # The scaler, for loops that call its unscale_() and then clip: at step() nobody else could tell
    # by how much the gradients were unscaled, and by how much clipped.
    grad_scaler: torch.amp.GradScaler | None = None

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self._model, wrapper = check_model(model)
        # Groups hold what was asked of them, and a process group can't be pickled.
        self._settings = replace(settings, param_groups=None, process_group=None)
        layers = self._find_layers()
        preconditioned = {parameter for found in layers for parameter in found.parameters()}
        groups = build_groups(self._model, preconditioned, settings)
        progress = {
            "steps": 0,
            "skipped_steps": 0,
            "refresh_overdue": False,
            "state_format": STATE_FORMAT,
            **MEMORY,
        }
        super().__init__(groups, {**settings.of_groups, **progress})
        self._attach(layers, wrapper, settings.process_group)

    def _find_layers(self) -> list[FoundLayer]:
        norms = self._settings.norms == "unitwise"
        return find_layers(self._model, self._settings.skip, norms=norms)

    def _attach(
        self,
        layers: Sequence[FoundLayer],
        wrapper: DistributedDataParallel | None,
        process_group: ProcessGroup | None,
    ) -> None:
        """Build the engine and hook the layers; the hooks go when the optimizer does."""
        settings, model = self._settings, self._model
        names = [found.name for found in layers]
        self._wrapper, self._process_group = wrapper, GroupReference.to(process_group)
        self._ranks = join_group(
            model,
            wrapper,
            process_group,
            settings.strategy,
            lambda: describe(self, settings, model, names),
        )
        self._engine = Engine(settings, self._ranks, model)
        # Nothing in a step gains by being compiled, and tracing all its branches takes a minute.
        self._engine_step = torch.compiler.disable(self._engine.step)
        self._engine_prepare = torch.compiler.disable(self._engine.prepare)
        self._engine_reset = torch.compiler.disable(self._engine.reset)
        self._consolidated: dict[Tensor, dict[str, Any]] | None = None
        take_over(use.module for found in layers for use in found.uses)
        recorders = []
        for found in layers:
            recorder = Recorder(found.uses[0].adapter, *found.slices(), self._engine.plan)
            self._engine.add(found.name, found.module_name, recorder)
            recorders.append(recorder)
        self._extra_pass: ExtraPass | None = None
        options, forwards = settings.fisher_options, self._engine.forwards
        sampling = self._engine.plan.curvature and options["name"] != "empirical"
        if sampling or forwards is not None:
            reduction = settings.loss_reduction
            self._extra_pass = ExtraPass(self._engine.plan, recorders, options, reduction, forwards)
        handles = self._hook(dict(zip(recorders, layers, strict=True)))
        self._engine.plan.release = weakref.finalize(self, _remove_all, handles)
        self._engine.assign()
        self._engine.adopt(self.state)
        self._prepare()
        self._meet_trainers()

    def _hook(self, layers: Mapping[Recorder, FoundLayer]) -> list[Handle]:
        plan = self._engine.plan
        handles: list[Handle] = []
        if not plan.curvature and plan.halves == "none":
            return handles
        attentions: dict[nn.Module, dict[Recorder, ProjectionAdapter]] = {}
        for recorder, found in layers.items():
            handles.append(hook_gradient(recorder))
            for use in found.uses:
                if isinstance(use.adapter, ProjectionAdapter):
                    attentions.setdefault(use.module, {})[recorder] = use.adapter
                else:
                    how = (use.adapter, use.curvature, use.sequence_first)
                    handles.append(hook_module(use.module, recorder, *how))
        handles += hook_batch(self._model, plan.examples)
        names = {module: name for name, module in self._model.named_modules()}
        handles += [hook_attention(m, names[m], roles) for m, roles in attentions.items()]
        if self._extra_pass is not None:
            handles.append(hook_output(self._model, self._extra_pass))
        return handles

    @property
    def steps(self) -> int:
        """Calls of `step()`, those that were skipped included."""
        return int(self.param_groups[0]["steps"])

    @property
    def skipped_steps(self) -> int:
        """Steps that changed nothing, because something was non-finite. Reads from the device."""
        return int(self._engine.skipped.total)

    @property
    def last_step(self) -> Outcome:
        """How the last step came to its size: by which rule, its coefficients, radius and so on."""
        return self._engine.outcome

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        A gradient, loss or factor that is not finite leaves parameters, momentum and curvature as
        they were.
        """
        if self._engine.plan.retired:
            raise RuntimeError(
                f"this {type(self).__name__} no longer trains its model, because another fop "
                "optimizer was built on it afterwards and took it over: use the newer one (and "
                "build schedulers from it), or build this one again"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["reference_lr"] = reference_lr(group)
        retry = self._engine_step(
            self.param_groups, self.state, self._loss_scale(), _as_tensor(loss)
        )
        self._consolidated = None
        if self._extra_pass is not None:
            self._extra_pass.forget()
        for group in self.param_groups:
            group["steps"] += 1
            group["refresh_overdue"] = retry
        self._prepare()
        return loss

    def _prepare(self) -> None:
        """Tell the hooks what the next step needs. All it rests on is part of the state_dict."""
        retry = bool(self.param_groups[0]["refresh_overdue"])
        self._engine_prepare(self.steps + 1, self.state, retry=retry)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients, and what was recorded together with them."""
        super().zero_grad(set_to_none)
        self._engine_reset()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises, except while the optimizer is built: new parameters have no hooked layer."""
        if hasattr(self, "_engine"):
            raise RuntimeError(
                f"{type(self).__name__} can't take parameters after it was built, because it "
                "preconditions layers, not single parameters: build it again with the full model, "
                "and with param_groups for different options"
            )
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        check_group(group)
        group["reference_lr"] = reference_lr(group)

    def consolidate_state_dict(self, to: int | None = None) -> None:
        """Bring together the curvature that the ranks keep, on rank `to` or, by default, on all.

        All ranks must call this, each time before `state_dict()`. Not needed on one process or with
        strategy="all", nor where a trainer saves.
        """
        if to is not None and not 0 <= to < self._ranks.size:
            raise ValueError(f"to must be a rank from 0 to {self._ranks.size - 1}, got {to!r}")
        if self._part is not None:
            layers = self._engine.layers
            found = consolidate(self.state, self.param_groups, layers, self._ranks, to)
            self._consolidated = self._consolidated if found is None else found

    def _meet_trainers(self) -> None:
        explain_clipping(SecondOrderOptimizer)
        if self._part is not None:
            gather_where_trainers_save(SecondOrderOptimizer)

    def state_dict(self) -> dict[str, Any]:
        """As in torch.optim; with several ranks, after `consolidate_state_dict()`."""
        for group in self.param_groups:
            group["skipped_steps"] = self.skipped_steps
        packed = super().state_dict()
        if self._part is None or self.steps == 0:
            return packed
        if self._consolidated is None:
            raise RuntimeError(
                f"rank {self._ranks.index} keeps a part of the state only (the curvature of "
                "some layers or, of a sharded model, some rows): call "
                "optimizer.consolidate_state_dict() on all ranks after the last step and before "
                "state_dict(), or consolidate_state_dict(to=0) to save on rank 0"
            )
        add_consolidated(packed, self.param_groups, self._consolidated)
        return packed

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state; training continues bit for bit as from where it was saved.

        All that is in `param_groups` comes from the state: lr, momentum, weight_decay, nesterov,
        damping, the fallback's rule and options, and the number of steps. All other arguments of
        the constructor (kl_clip, update_every, ...) stay as they are.

        A state that does not belong to this optimizer, or has a damaged entry, raises and changes
        nothing. Curvature saved under another `damping_mode` goes on from its moving
        averages. With several ranks, all of them load the full state; their number may be another
        than when it was saved.
        """
        # Torch's own method casts curvature to the parameter's type, and runs the hooks after any
        # check that could be made here.
        state_dict = dict(state_dict)
        before, after = load_hooks(self)
        for hook in before:
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        state, groups = read_state(state_dict, self.param_groups, self._engine.layers)
        self._settings.interval(groups[0]["steps"] + 1)  # the user's function may raise
        self.__setstate__({"state": state, "param_groups": groups})
        self._consolidated = None
        self._engine.skipped.total = int(self.param_groups[0]["skipped_steps"])
        self._engine.adopt(self.state)
        self._engine.forget()
        self._prepare()
        self._meet_trainers()  # Accelerate loads the state when it takes the optimizer over
        for done in after:
            done(self)

    def _loss_scale(self) -> LossScale | None:
        """What GradScaler.step() has attached for the time of this step."""
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None:
            return None
        scale = getattr(self, "grad_scale", None)
        inverse = None if scale is None else scale.reciprocal()
        return LossScale(inverse, found_inf, self.grad_scaler)

    def __getstate__(self) -> dict[str, Any]:
        # With the model in the same pickle or deep copy, the two stay connected.
        names = ("_model", "_settings", "_wrapper", "_process_group")
        parts: dict[str, Any] = dict(super().__getstate__())
        parts.update({name: self.__dict__[name] for name in names})
        return {**parts, "_part": self._part}

    @property
    def _part(self) -> tuple[int, int] | None:
        """Rank and number of ranks, where a rank keeps a part of the state only."""
        ranks = self._ranks
        partial = ranks.partial_curvature or ranks.partial_rows
        return (ranks.index, ranks.size) if partial else None

    def __setstate__(self, state: dict[str, Any]) -> None:
        part = state.pop("_part", None)
        super().__setstate__(state)
        if "_model" not in state:  # load_state_dict also comes through here
            return
        group = self._process_group
        self._attach(self._find_layers(), self._wrapper, None if group is None else group.group)
        if part is not None and part != self._part and self.steps:
            raise RuntimeError(
                f"this optimizer was pickled on rank {part[0]} of {part[1]}, with that rank's part "
                f"of the state, but this is rank {self._ranks.index} of {self._ranks.size}: "
                "call consolidate_state_dict() on all ranks, then save and load state_dict()"
            )

    def __repr__(self) -> str:
        layers = [layer for layer in self._engine.layers if not layer.recorder.disabled]
        lines = [f"{len(layers)} layers with {self._settings.curvature} curvature"]
        covered = {parameter for layer in layers for parameter in layer.parameters}
        rest = [
            name
            for group in self.param_groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
            if parameter not in covered
        ]
        if rest:
            where = describe_modules(self._model, rest)
            rule = self._settings.fallback_of_groups["rule"]
            lines.append(f"{len(rest)} parameters use {rule} ({where})")
        lines.append(self._settings.described())
        for number, group in enumerate(self.param_groups):
            options = (f"{name}: {group[name]}" for name in sorted(GROUP_OPTIONS))
            lines.append(f"group {number}, {len(group['params'])} parameters: {', '.join(options)}")
        return "\n    ".join([f"{type(self).__name__} (", *lines]) + "\n)"


def _as_tensor(loss: Any) -> Tensor | None:
    """What a closure returned, where it can be told to be finite."""
    if isinstance(loss, Tensor):
        return loss.detach() if loss.is_floating_point() else None
    return torch.tensor(float(loss)) if isinstance(loss, (int, float)) else None


def _remove_all(handles: list[Handle]) -> None:
    for handle in handles:
        handle.remove()
