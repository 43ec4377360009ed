"""One step over all layers, as a straight line of phases.

    collect     this rank's gradients; are they finite? is anything wrong?
    batch       what all ranks bring together; layers that can't be handled are disabled
    reduce      gradients, half-gradient differences and second moments, to the layers' owners
    refresh     moving averages, damping rule, decompositions: of the layers that are due
    directions  KFAC's or FOP's update of each layer, by its owner
    scale       one factor for all of them: the step rule
    apply       weight decay, momentum, parameters

On one process the ranks are the identity. Whether a step is finite is decided on the device: one
that is not is carried out with every change masked, so that no scalar has to be read by the host.
Only steps that refresh curvature read a few, because decompositions need that anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fop.capture import CapturePlan, Forwards, Recorder
from fop.checkpoints import RULE_KEYS
from fop.collect import ModuleTree, collect, follow_parameters
from fop.context import Context, Options
from fop.costs import refresh_cost
from fop.curvature import make_curvature
from fop.directions import Directions, gradients
from fop.disabling import disable_unfit
from fop.distributed import Batch, Contribution, Ranks, Updates
from fop.layer import Layer, State
from fop.linalg import on_host
from fop.messages import Messages
from fop.projection import Coefficients
from fop.refresh import phases, refresh
from fop.scaling import LossScale, Number, unscaled
from fop.settings import Settings
from fop.sizing import SizedSteps
from fop.skips import SkippedSteps, name_non_finite
from fop.slices import ParameterSlice
from fop.trust import Memory, Outcome
from fop.update import Change, apply_changes, rest_of

Group = Mapping[str, Any]
# a and d of a layer, and the examples in the two half-batches.
Gradients = tuple[tuple[Tensor, Tensor | None], tuple[Number, Number]]

# Of refreshes, for the costs of a layer, where the user's is a function of the step.
TYPICAL_INTERVAL = 10


class Engine:
    """The layers of one model, and what the last step found out about them."""

    def __init__(self, settings: Settings, ranks: Ranks, model: nn.Module) -> None:
        self.settings = settings
        self.ranks = ranks
        self._tree = ModuleTree(model)
        self._curvature = make_curvature(settings.curvature, settings.damping_mode)
        # The matrices of a norm layer are small enough to be damped exactly in any case.
        unitwise = "identity" if settings.curvature == "identity" else "kronecker"
        self._unitwise = make_curvature(unitwise, "exact")
        requires = self._curvature.requires
        if requires.squares and requires.factors and ranks.partial_curvature:
            raise ValueError(
                f"curvature={settings.curvature!r} measures in the eigenbasis while the backward "
                f"pass runs, and with strategy={settings.strategy!r} a rank has that of its own "
                'layers only: use strategy="all"'
            )
        self.plan = CapturePlan(
            halves=settings.halves_among(ranks.size) if settings.needs_halves else "none",
            sharing=settings.sharing,
            max_factor_size=settings.max_factor_size,
            empirical=settings.fisher_options["name"] in ("empirical", "auto"),
            curvature=requires.factors or requires.squares,
            odd_rank=ranks.index % 2 == 1,
        )
        self.layers: list[Layer] = []
        self.clip: Tensor | None = None  # of the last step
        self.batch: Batch | None = None
        self._coefficients: dict[Layer, tuple[Coefficients, int]] = {}
        self.loss_scale: LossScale | None = None
        self.messages = Messages()
        self.skipped = SkippedSteps()
        self.forwards = Forwards() if settings.sizes_itself else None
        self._sized = None if self.forwards is None else SizedSteps(model, self.forwards)
        self.outcome = Outcome("fixed", "no step yet")  # of the last step
        self._next_step = 1
        self._kinds: dict[Any, tuple[torch.device, torch.dtype]] = {}

    # ---- between steps

    def add(self, name: str, module_name: str, recorder: Recorder) -> None:
        curvature = self._unitwise if recorder.adapter.autograd_backward else self._curvature
        recorder.factors = curvature.requires.factors
        self.layers.append(Layer(name, module_name, recorder, curvature))

    def assign(self) -> None:
        """Share out the layers, once all are added."""
        steps = self.settings.schedule["steps"]
        interval = steps if isinstance(steps, int) else TYPICAL_INTERVAL
        self.ranks.assign(self.layers, self.plan, interval)

    def prepare(self, next_step: int, state: State, *, retry: bool) -> None:
        """Decide what the backward passes before `next_step` record."""
        self._next_step = next_step
        interval, offsets = self.settings.interval(next_step), [0] * len(self.layers)
        if self.settings.schedule["stagger"]:
            offsets = list(phases(tuple(refresh_cost(x.work) for x in self.layers), interval))
        self.plan.examples.forget()
        for layer, offset in zip(self.layers, offsets, strict=True):
            recorder = layer.recorder
            layer.let_go()
            recorder.refresh_due = retry or (
                self.plan.curvature and self.settings.refresh_due(next_step, offset)
            )
            recorder.begin_step()
            recorder.basis = None
            if layer.curvature.requires.squares and self.ranks.owns(layer):
                recorder.basis = layer.curvature.basis(layer.state_in(state))

    def adopt(self, state: State) -> None:
        """Keep of a loaded state what this rank is to keep, and agree on what there is."""
        for layer in self.layers:
            layer.sample = layer.recorder.sample()
            for key in () if self.ranks.owns(layer) else layer.keys:
                state.get(layer.weight, {}).pop(key, None)
        for parameter, own in state.items():
            rows = ParameterSlice(parameter)  # type: ignore[arg-type]
            for key in RULE_KEYS & own.keys() if rows.sharded else ():
                if own[key].shape == parameter.shape:
                    own[key] = rows.held(own[key]).clone()
        self._note_ready(
            self.layers, self.ranks.any_rank([self._usable(x, state) for x in self.layers])
        )

    def reset(self) -> None:
        """Forget what was recorded, together with the gradients it belongs to."""
        for layer in self.layers:
            layer.recorder.reset()
        self.plan.passes.forget()
        if self.forwards is not None:
            self.forwards.forget()
        self.ranks.reset()
        self.batch = None

    def forget(self) -> None:
        """Forget everything that was recorded."""
        for layer in self.layers:
            layer.recorder.forget()
        self.reset()

    def _usable(self, layer: Layer, state: State) -> bool:
        """Whether this rank has curvature that fits the layer."""
        if layer.recorder.disabled or not self.ranks.owns(layer):
            return False
        return layer.curvature.ready(layer.state_in(state), layer.sample.shape)

    def _note_ready(self, layers: Sequence[Layer], ready: Sequence[bool]) -> None:
        for layer, fits in zip(layers, ready, strict=True):
            layer.recorder.curvature_shape = layer.sample.shape if fits else None

    # ---- the step

    def step(
        self,
        groups: Iterable[Group],
        state: State,
        loss_scale: LossScale | None,
        loss: Tensor | None = None,
    ) -> bool:
        """Change every parameter that has a gradient; True if curvature must be tried again.

        `loss` is what a closure returned, if there was one.
        """
        options = {parameter: group for group in groups for parameter in group["params"]}
        self.loss_scale, ranks = loss_scale, self.ranks
        batch = self._bring_together(options, state, loss)
        if batch is None:
            return any(layer.recorder.refresh_due for layer in self.layers)
        layers, parameters = batch.taking_part()
        expecting, counts = disable_unfit(layers, self.layers, batch, ranks.size, self.messages)
        layers = [layer for layer in layers if not layer.recorder.disabled]
        with_moments = [layer for layer in expecting if counts[layer].examples]
        rest = rest_of(parameters, layers)
        batch.reduce(with_moments, list(rest))
        finite, number, last = batch.finite, self._next_step, self._coefficients
        context = Context(
            self.settings, ranks, self.messages, number, options, state, loss_scale, last
        )
        failed: list[Layer] = []
        retry = bool(expecting) and not bool(finite)
        if with_moments and not retry:
            failed, retry = refresh(context, with_moments, counts, batch)
        for layer in layers:
            if layer.sample.statistics.passes:  # recorded, but of no use on this step
                layer.drop_moments()
        usable = {layer: self._usable(layer, state) for layer in layers}
        host = on_host(finite)
        directions = Directions(context, batch, usable, host)
        wait = ranks.broadcast(layers, directions.compute)
        self._coefficients = directions.coefficients
        totals = ranks.all_sum(directions.total_terms(), "clip")
        finite = finite & totals.isfinite().all().to(finite.device) & (not retry)
        pairs = ranks.any_rank([flag for x in expecting for flag in (x in failed, usable[x])])
        self._note_ready(expecting, pairs[1::2])
        updates, sized = wait(), False
        if self._sized is not None and bool(finite):
            sized = self._size(context, updates, batch, rest, totals, layers)
        if not sized:
            updates = self._scale(updates, totals, layers)
            if not host:  # carried out with every change masked
                self._apply(context, updates, batch, rest, finite)
            elif bool(finite):
                self._apply(context, updates, batch, rest, None)
        self._count(finite, options, may_read=bool(expecting))
        return retry or any(pairs[::2])

    def _bring_together(self, options: Options, state: State, loss: Tensor | None) -> Batch | None:
        """What all ranks bring to the step; None where there is not one gradient."""
        own = collect(self.layers, options, self.ranks, self._tree, loss, self.loss_scale)
        if not own.parameters:
            if own.problem is not None:
                raise own.problem
            return None
        self._follow(own.parameters, state)
        batch = self.ranks.batch(own)
        self.batch = batch if self.ranks.size > 1 else None  # alone, it can be had again
        return None if not own.gradients and self._nobody_has_gradients(batch) else batch

    def _follow(self, parameters: Iterable[nn.Parameter], state: State) -> None:
        """Move state along with a model that was moved or cast after the last step."""
        kinds = {p: (p.device, p.dtype) for p in parameters}
        moved = [p for p, kind in kinds.items() if self._kinds.get(p, kind) != kind]
        self._kinds |= kinds
        if moved:
            follow_parameters(moved, self.layers, state)

    def _nobody_has_gradients(self, batch: Batch) -> bool:
        """Whether no rank has one; where some have, all skip the step."""
        missing = batch.without_gradients()
        if missing == self.ranks.size:
            self.ranks.reset()
            return True
        self.messages.no_gradients(self.ranks.index, missing, self.ranks.size)
        return False

    # ---- what the last step left

    def coefficients(self, layer: Layer) -> Coefficients | None:
        """None where the layer had no direction on this rank."""
        found, index = self._coefficients.get(layer, (None, 0))
        return None if found is None else found.of_layer(index)

    def gradients(self, layer: Layer) -> Gradients | None:
        """a, d and the examples of both halves; None where they are gone, or on another rank."""
        batch = self.batch
        if batch is None and self.ranks.size == 1:  # before the step
            layer.sample, flag = layer.recorder.sample(), torch.ones((), dtype=torch.bool)
            batch = Batch(Contribution([layer], [], {}, flag, self.loss_scale, None))
        if batch is None or not self.ranks.owns(layer) or not batch.has(layer):
            return None
        halves = self.settings.needs_halves
        return gradients([layer], batch, self.loss_scale, halves=halves), batch.half_sizes(layer)

    # ---- scale and apply

    def _size(
        self,
        context: Context,
        updates: Updates,
        batch: Batch,
        rest: Mapping[nn.Parameter, Sequence[ParameterSlice]],
        totals: Tensor,
        layers: Sequence[Layer],
    ) -> bool:
        """Take a step that sizes itself; False where the fixed rule has to."""
        assert self._sized is not None
        plain = unscaled([batch.gradient(parameter) for parameter in rest], self.loss_scale)
        changes = _changes(updates, rest, plain)
        of_layers = {
            p for c in changes if context.options[p := c.part.parameter]["rule"] == "curvature"
        }
        preconditioned = of_layers - self._disabled_parameters()
        _, energy, difference = totals.tolist()
        noise = None
        if layers:
            first, second = (float(number) for number in batch.half_sizes(layers[0]))
            if first > 0 and second > 0:
                noise = difference * first * second / (first + second) ** 2
        memory = Memory(next(iter(context.options.values())))
        found = self._sized.take(context, changes, preconditioned, memory, energy, noise)
        if isinstance(found, str):
            self.messages.fixed_rule(found)
            self.outcome = Outcome("fixed", found)
            return False
        self.outcome, self.clip = found, None
        return True

    def _scale(self, updates: Updates, totals: Tensor, layers: Sequence[Layer]) -> Updates:
        """By the step rule."""
        self.clip = self.settings.step_rule.scale(totals)
        if self.clip is not None:
            for tensor in updates.of(layer for layer in layers if layer.ready):
                tensor.mul_(self.clip.to(tensor))
        return updates

    def _apply(
        self,
        context: Context,
        updates: Updates,
        batch: Batch,
        rest: Mapping[nn.Parameter, Sequence[ParameterSlice]],
        finite: Tensor | None,
    ) -> None:
        """Change all parameters; where `finite` is a flag on the device, only if it is true."""
        plain = list(unscaled([batch.gradient(parameter) for parameter in rest], self.loss_scale))
        if finite is not None:
            for tensor in updates.memory:
                tensor.masked_fill_(~finite.to(tensor.device), 0.0)
            plain = [
                g
                if context.options[p]["rule"] == "adamw"
                else torch.where(finite.to(g.device), g, 0)
                for p, g in zip(rest, plain, strict=True)  # AdamW's kernel masks itself
            ]
        changes = _changes(updates, rest, plain)
        taken: dict[Tensor, Tensor | None] = {}
        for parameter in {change.part.parameter for change in changes}:
            flag, present = finite, batch.present(parameter)
            if present is not None and finite is not None:
                flag = finite.to(present.device) & present
            elif present is not None and not bool(present):
                continue
            taken[parameter] = flag
        of_layers = {p for p in taken if context.options[p]["rule"] == "curvature"}
        preconditioned = of_layers - self._disabled_parameters()
        apply_changes(changes, context.options, context.state, self.settings, preconditioned, taken)

    def _disabled_parameters(self) -> set[Tensor]:
        """Those that belong to disabled layers alone."""
        by_status: dict[bool, set[Tensor]] = {True: set(), False: set()}
        for layer in self.layers:
            by_status[layer.recorder.disabled].update(layer.recorder.all_parameters)
        return by_status[True] - by_status[False]

    def _count(self, taken: Tensor, options: Options, *, may_read: bool) -> None:
        self.skipped.count(taken)
        scaled = self.loss_scale is not None
        in_a_row = self.skipped.overdue(scaled=scaled, may_read=may_read)
        if in_a_row:
            self.messages.skipped(in_a_row, name_non_finite(options))


def _changes(
    updates: Updates,
    rest: Mapping[nn.Parameter, Sequence[ParameterSlice]],
    plain: Sequence[Tensor],
) -> list[Change]:
    """Of layers, and of parameters in none, by their plain gradients."""
    changes = [
        Change(part, part.held(update))
        for layer, parts in updates.parts.items()
        for part, update in zip(layer.sample.slices, parts, strict=True)
    ]
    for parts, gradient in zip(rest.values(), plain, strict=True):
        changes += [Change(part, part.local(gradient)) for part in parts]
    return changes
