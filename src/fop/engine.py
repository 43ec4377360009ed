"""One step over all layers, in the order the data flows.

    gradients -> are they sound? -> curvature, when due -> projection -> KL clip -> parameters

Between the arrows stands the exchange with other ranks (`fop.distributed`). On one process it hands
back what it is given; with more, a rank renews and applies the curvature of the layers it owns, and
every rank applies all updates.

Whether a step is sound is decided on the device: an unsound one is carried out with every change
masked, so no scalar has to be read by the host. Only steps that renew curvature read a few, because
decompositions need that anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fop.block import Block, State
from fop.capture import CapturePlan, Recorder, Statistics, factor_dtype
from fop.checkpoints import RULE_KEYS, LayerEntries
from fop.checks import ModuleTree, bypassed_layers, find_problem
from fop.curvature import make_curvature
from fop.distributed import Exchange, Gathered, Reading, Report, Request, Totals, Verdict
from fop.linalg import all_finite, on_host
from fop.notices import Notices
from fop.projection import Coefficients, Metric, fop_update
from fop.renewal import make_factors, renew
from fop.rules import adamw_step, fallback_lr, momentum_step
from fop.scaling import LossScale, Number
from fop.settings import Settings
from fop.shards import is_sharded, local, own_rows, padded
from fop.skips import SkippedSteps, name_non_finite
from fop.stagger import phases

Group = Mapping[str, Any]

# Of curvature renewals, for the costs of a layer, where the user's is a function of the step.
TYPICAL_INTERVAL = 10


class Engine:
    """The blocks of one model, and what the last step found out about them."""

    def __init__(self, settings: Settings, exchange: Exchange, model: nn.Module) -> None:
        self.settings = settings
        self._tree = ModuleTree(model)
        self.exchange = exchange
        self._curvature = make_curvature(settings.curvature, settings.damping_mode)
        # The blocks of a norm layer are small enough to be damped exactly in any case.
        unitwise = "identity" if settings.curvature == "identity" else "kronecker"
        self._unitwise = make_curvature(unitwise, "exact")
        halves = settings.halves
        if halves == "auto":
            halves = "samples" if exchange.ranks == 1 else "ranks"
        elif halves == "ranks" and exchange.ranks == 1:
            raise ValueError(
                'halves="ranks" takes even and odd ranks of a process group as the two halves, but '
                'this is a single process: use "samples", or "auto" to have both cases served'
            )
        if settings.curvature == "ekfac" and exchange.sharded:
            raise ValueError(
                'curvature="ekfac" measures in the eigenbasis while the backward pass runs, and '
                f"with strategy={settings.strategy!r} a rank has that of its own layers only: use "
                'strategy="all"'
            )
        self.plan = CapturePlan(
            halves=halves if settings.needs_halves else "none",
            sharing=settings.sharing,
            max_factor_size=settings.max_factor_size,
            empirical=settings.fisher_options["name"] == "empirical",
            curvature=settings.curvature != "identity",
            odd_rank=exchange.index % 2 == 1,
        )
        self.blocks: list[Block] = []
        self.coefficients: dict[str, Coefficients] = {}
        self.clip: Tensor | None = None
        self.loss_scale: LossScale | None = None
        self.notices = Notices()
        self.skipped = SkippedSteps()
        self._uses = 1  # steps that a layer's metric serves on, before it is renewed

    def add(self, name: str, module_name: str, capture: Recorder) -> None:
        curvature = self._unitwise if capture.adapter.observed else self._curvature
        self.blocks.append(Block(name, module_name, capture, curvature))

    def place(self) -> None:
        """Share out the blocks, once all are added."""
        steps = self.settings.schedule["steps"]
        interval = steps if isinstance(steps, int) else TYPICAL_INTERVAL
        self.exchange.place(self.blocks, self.plan, interval)

    @property
    def curvature_keys(self) -> set[str]:
        """Names of what curvature keeps in the optimizer's state."""
        return {key for block in self.blocks for key in block.keys}

    def declared(self) -> list[LayerEntries]:
        """What a state may hold for each layer."""
        return [
            LayerEntries(
                block.name,
                block.weight,
                block.layer.state_prefix,
                block.curvature.keys,
                block.sizes,
            )
            for block in self.blocks
        ]

    def prepare(self, next_step: int, state: State, *, retry: bool) -> None:
        """Decide what the backward passes before `next_step` capture."""
        interval = self.settings.interval(next_step)
        self._uses = interval
        self.plan.examples.forget()
        for block, phase in zip(self.blocks, self._phases(interval), strict=True):
            capture = block.capture
            capture.refresh_due = retry or self.settings.refresh_due(next_step, phase)
            capture.begin_step()
            capture.basis = None
            if block.ready and self.exchange.owns(block):
                capture.basis = block.curvature.basis(block.state_in(state))

    def _phases(self, interval: int) -> Sequence[int]:
        """By how many steps each block's renewals come after those of the plain schedule."""
        if not self.settings.schedule["stagger"]:
            return [0] * len(self.blocks)
        return phases([block.refresh_cost(self.settings) for block in self.blocks], interval)

    def adopt(self, state: State) -> None:
        """Keep of a loaded state what this rank is to keep, and agree on what there is."""
        mine = []
        for block in self.blocks:
            owned = self.exchange.owns(block)
            mine.append((False, owned and self._usable(block, state)))
            for key in () if owned else block.keys:
                state.get(block.weight, {}).pop(key, None)
        for parameter, own in state.items():
            for key in RULE_KEYS & own.keys() if is_sharded(parameter) else ():
                if own[key].shape == parameter.shape:
                    own[key] = own[key][own_rows(parameter)].clone()
        _, verdicts = self.exchange.settle(torch.zeros((), device=self._device), mine)
        self._note(self.blocks, verdicts)

    def _usable(self, block: Block, state: State) -> bool:
        """Whether this rank has curvature that fits the layer."""
        fits = block.curvature.ready(block.state_in(state), block.capture.shape)
        return fits and not block.capture.disabled

    def _disable(self, blocks: Iterable[Block]) -> None:
        """From now on the fallback optimizer trains these layers."""
        for block in blocks:
            block.capture.disabled = True
            block.capture.forget()

    def _note(self, blocks: Sequence[Block], verdicts: Sequence[Verdict]) -> None:
        for block, (_, ready) in zip(blocks, verdicts, strict=True):
            block.capture.curvature_shape = block.capture.shape if ready else None

    @property
    def _device(self) -> torch.device:
        return self.blocks[0].weight.device if self.blocks else torch.device("cpu")

    def reset(self) -> None:
        """Forget what was captured, together with the gradients it belongs to."""
        for block in self.blocks:
            block.capture.reset()
        self.plan.passes.forget()
        self.exchange.forget()

    def forget(self) -> None:
        """Forget everything that was captured."""
        for block in self.blocks:
            block.capture.forget()
        self.reset()

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
        for block in self.blocks:
            block.capture.meet_gradient()
        options = {parameter: group for group in groups for parameter in group["params"]}
        trained: list[Tensor] = list(self.exchange.trained(options))
        gradients: dict[Tensor, Tensor] = {p: p.grad for p in trained if p.grad is not None}
        problem = find_problem(self.blocks, gradients, options, self._tree)
        if not trained:
            if problem is not None:
                raise problem
            return any(block.capture.refresh_due for block in self.blocks)
        self._follow_parameters(trained, state)
        self.loss_scale = loss_scale
        changing = dict.fromkeys(trained)
        active = [block for block in self.blocks if block.weight in changing]
        healthy = torch.zeros((), dtype=torch.bool, device=trained[0].device)
        if problem is None and gradients:
            healthy = self._healthy(gradients, active, loss).to(trained[0].device)
        report = Report(active, trained, gradients, healthy, loss_scale, problem)
        totals = self.exchange.total(report)
        if not gradients:  # then all ranks skip the step
            missing = totals.without_gradients()
            if missing == self.exchange.ranks:
                self.exchange.forget()
                return any(block.capture.refresh_due for block in self.blocks)
            self.notices.no_gradients(self.exchange.index, missing, self.exchange.ranks)
        active, trained = totals.taking_part()
        for block in active:
            if block.capture.seen.without_forward and not block.capture.disabled and block.ready:
                self.notices.bypassed(block)
            elif block.capture.seen.foreign and not block.capture.disabled:
                self.notices.foreign(block)
        expecting = [b for b in active if b.capture.wants_moments and not b.capture.disabled]
        reading = totals.read() if expecting else None
        self.notices.mismatches([b for b in active if not b.capture.disabled])
        with_sums = []
        self._disable_misfits(reading)
        expecting = [block for block in expecting if not block.capture.disabled]
        if reading is not None:
            self._disable_uncounted(active, expecting, reading)
            expecting = [block for block in expecting if not block.capture.disabled]
            counts = {block: reading.counts[block] for block in expecting}
            bypassed = bypassed_layers(counts, self.blocks)
            self._disable(bypassed)
            self.notices.never_called(bypassed)
            with_sums = [block for block in expecting if counts[block].examples]
        covered = _covered(active)
        others = [p for p in trained if p not in covered or covered[p] < p.numel()]
        gathered = self.exchange.gather(
            Request(active, with_sums, others, totals, self.settings.needs_halves, loss_scale)
        )
        failed: list[Block] = []
        sound = reading is None or reading.healthy
        if reading is not None and with_sums and sound:
            self._look_for_halves(with_sums, reading)
            failed, sound = self._refresh(with_sums, reading, gathered, options, state)
        for block in active:
            block.capture.drop_moments()
        directions, healthy, verdicts = self._precondition(
            active, expecting, failed, gathered, totals, options, state
        )
        rest = gathered.gradients(others)
        updates = dict(zip(rest, self._unscaled(list(rest.values())), strict=True))
        for parameter in rest:
            if parameter in covered:  # layers write to their parts of it
                updates[parameter] = padded(parameter, updates[parameter])
        for block, parts in directions.items():
            block.write(parts, updates)
        for parameter in filter(is_sharded, covered):
            updates[parameter] = updates[parameter][own_rows(parameter)]
        if not sound:
            healthy = torch.zeros_like(healthy)
        self._apply(trained, updates, totals, healthy, options, state)
        self._count(healthy, options, may_read=reading is not None)
        self._note(expecting, verdicts)
        return not sound or any(has_failed for has_failed, _ in verdicts)

    def _apply(
        self,
        trained: Sequence[Tensor],
        updates: Mapping[Tensor, Tensor],
        totals: Totals,
        healthy: Tensor,
        options: Mapping[Tensor, Group],
        state: State,
    ) -> None:
        decoupled = self.settings.decoupled_weight_decay
        disabled = self._disabled_parameters()
        for parameter in trained:
            group, own, go = options[parameter], state[parameter], healthy.to(parameter.device)
            present = totals.present(parameter)
            if present is not None:
                go = go & present.to(go.device)
            known = on_host(go)
            if known and not bool(go):
                continue
            flag = None if known else go
            update, mine = updates[parameter], local(parameter)
            preconditioned = group["rule"] == "curvature" and parameter not in disabled
            lr = group["lr"] if preconditioned else fallback_lr(group)
            if preconditioned or self.settings.fallback_of_groups["rule"] == "sgd":
                momentum_step(mine, update, own, group, flag, lr, decoupled=decoupled)
            else:
                adamw_step(mine, update, own, group, flag, lr)

    def _disabled_parameters(self) -> set[Tensor]:
        """Those that belong to disabled layers alone."""
        by_status: dict[bool, set[Tensor]] = {True: set(), False: set()}
        for block in self.blocks:
            by_status[block.capture.disabled].update(block.capture.all_parameters)
        return by_status[True] - by_status[False]

    def _count(self, taken: Tensor, options: Mapping[Tensor, Group], *, may_read: bool) -> None:
        self.skipped.count(taken)
        scaled = self.loss_scale is not None
        in_a_row = self.skipped.overdue(scaled=scaled, may_read=may_read)
        if in_a_row:
            self.notices.skipped(in_a_row, name_non_finite(options))

    def _unscaled(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Gradients without the loss scale of mixed precision, where they still carry it."""
        if self.loss_scale is None or self.loss_scale.inverse is None:
            return gradients
        inverse = self.loss_scale.inverse
        return [gradient * inverse.to(gradient) for gradient in gradients]

    def _follow_parameters(self, trained: Iterable[Tensor], state: State) -> None:
        """Move state along with a model that was moved or cast after the optimizer was built."""
        precise = self.curvature_keys
        for parameter in trained:
            own = state.get(parameter, {})
            for key, value in own.items():
                if not isinstance(value, Tensor) or key == "step":
                    continue
                dtype = factor_dtype(parameter.dtype) if key in precise else parameter.dtype
                if value.device != parameter.device or value.dtype != dtype:
                    own[key] = value.to(parameter.device, dtype)

    def _healthy(
        self, gradients: Mapping[Tensor, Tensor], active: list[Block], loss: Tensor | None
    ) -> Tensor:
        """Whether everything this rank brings is finite: a 0-dimensional flag on the device."""
        tensors = [local(gradient) for gradient in gradients.values()]
        if loss is not None:
            tensors.append(loss)
        for block in active:
            tensors += block.capture.tensors()
        healthy = all_finite(tensors)
        if self.loss_scale is not None:
            healthy = healthy & (self.loss_scale.found_inf.to(healthy.device) == 0)
        return healthy

    def _disable_uncounted(
        self, active: list[Block], expecting: list[Block], reading: Reading
    ) -> None:
        """Disable layers whose calls had no single examples, on all ranks alike.

        Where the model's inputs do not tell how many examples there are, the layers do: one example
        per backward pass, where most layers saw more, is a call for the whole batch, as position
        embeddings have it. Its output is broadcast over the examples and its gradient summed over
        them, so nothing of a single example is left to build curvature or halves from.
        """
        counts = reading.counts
        disabled = [block for block in active if counts[block].mismatches]
        counted = [b for b in expecting if counts[b].passes and not counts[b].mismatches]
        seen = {block: counts[block].examples / counts[block].passes for block in counted}
        usual = _most_common(seen.values())
        once = [block for block in counted if seen[block] == 1 < usual]
        self.notices.called_once(once, usual)
        self._disable([*disabled, *once])
        # A layer that other passes use may well have another average.
        passes = _most_common(counts[block].passes for block in counted)
        others = [b for b in counted if counts[b].passes == passes and seen[b] not in (1, usual)]
        self.notices.other_counts({block: seen[block] for block in others}, usual)

    def _disable_misfits(self, reading: Reading | None) -> None:
        """Give up layers whose adapter does not fit what their module computes.

        Ranks agree on that when they read the totals; until then nothing is captured by those that
        have found it.
        """
        misfits = []
        for block in self.blocks:
            capture = block.capture
            found = capture.unsupported is not None
            if self.exchange.ranks > 1:
                counts = None if reading is None else reading.counts.get(block)
                found = counts is not None and counts.misfits > 0
            if found and not capture.disabled:
                capture.unsupported = (
                    capture.unsupported or "another rank found that its adapter is wrong"
                )
                misfits.append(block)
        self._disable(misfits)
        self.notices.misfits(misfits)

    def _refresh(
        self,
        fresh: list[Block],
        reading: Reading,
        gathered: Gathered,
        options: Mapping[Tensor, Group],
        state: State,
    ) -> tuple[list[Block], bool]:
        """Take the gathered sums into the curvature.

        Returns the layers where that failed, and whether the factors of all ranks are sound.
        """
        mine = [
            (block, gathered.sums(block, reading.counts[block]))
            for block in fresh
            if self.exchange.owns(block)
        ]
        for block in fresh:
            block.capture.drop_moments()
        self._make_factors(mine)
        # Sums that are finite on each rank may not be so together, or once they are scaled.
        bounds = (bound for _, sums in mine for bound in sums.bounds())
        unsound = bool(mine) and not bool(all_finite(bounds))
        _, agreed = self.exchange.settle(torch.zeros((), device=self._device), [(unsound, False)])
        if agreed[0][0]:
            return [], False
        shares = {b: share for b in fresh if (share := b.capture.take_unaccounted()) is not None}
        self.notices.unexplained(shares)
        failed = renew(mine, self.settings.factor_decay, self._uses, options, state)
        if failed:
            self.notices.not_inverted(failed)
        return failed, True

    def _make_factors(self, fresh: Sequence[tuple[Block, Statistics]]) -> None:
        # Extra passes differentiate each example's own loss, unscaled; training passes
        # differentiate the user's.
        empirical = self.plan.empirical
        reduction = self.settings.loss_reduction if empirical else "sum"
        for block, sums in fresh:
            scale = None
            if empirical and self.loss_scale is not None:
                if self.loss_scale.measured and block.capture.gradient_touched():
                    self.notices.unknown_scale()
                scale = self.loss_scale.of_captured(block.capture.gradient_ratio())
            make_factors(sums, self.settings.sharing, reduction, self.exchange.ranks, scale)

    def _precondition(
        self,
        active: list[Block],
        expecting: list[Block],
        failed: Sequence[Block],
        gathered: Gathered,
        totals: Totals,
        options: Mapping[Tensor, Group],
        state: State,
    ) -> tuple[Mapping[Block, Sequence[Tensor]], Tensor, list[Verdict]]:
        """The layers' updates, clipped together, and whether they are sound."""
        self.coefficients, self.clip = {}, None
        healthy = totals.healthy
        alignments: list[Tensor] = [torch.zeros((), device=healthy.device)]

        def compute(block: Block) -> Sequence[Tensor]:
            average = self._unscaled(gathered.average(block))
            if block.capture.disabled or not self._usable(block, state):
                return average
            metric = block.curvature.metric(block.state_in(state), block.shape)
            update, found = self._direction(block, average, gathered, metric)
            self.coefficients[block.name] = found
            reference = options[block.weight]["reference_lr"]
            alignments.append(found.update_alignment * reference**2)
            return block.split(update)

        wait = self.exchange.share(active, compute)
        total = torch.stack([term.to(alignments[-1]) for term in alignments]).sum()
        mine = [
            (block in failed, self.exchange.owns(block) and self._usable(block, state))
            for block in expecting
        ]
        alignment, verdicts = self.exchange.settle(total, mine)
        plain = {block for block, (_, ready) in zip(expecting, verdicts, strict=True) if not ready}
        if self.settings.kl_clip is not None:
            self.clip = (self.settings.kl_clip / alignment.abs()).sqrt().clamp(max=1.0)
        directions = wait()
        for block, parts in directions.items():
            preconditioned = block not in plain if block in expecting else block.ready
            if self.clip is not None and preconditioned:
                for part in parts:
                    part.mul_(self.clip.to(part))
        return directions, healthy & alignment.isfinite().to(healthy.device), verdicts

    def _direction(
        self, block: Block, average: Sequence[Tensor], gathered: Gathered, metric: Metric
    ) -> tuple[Tensor, Coefficients]:
        settings = self.settings
        matrix = block.matrix(average)
        difference = None
        if settings.needs_halves:
            examples = gathered.examples(block)
            difference = _difference(block, matrix, gathered)
            if difference is None:
                self.notices.no_halves([block], *examples)
        return fop_update(
            matrix, difference, metric, settings.beta, settings.eta, settings.total_weight
        )

    def recall(self, block: Block) -> tuple[Tensor, Tensor | None, tuple[Number, Number]] | None:
        """a, d and the examples of both halves; None where the gradient is gone or elsewhere."""
        gathered = self.exchange.recall(block)
        if gathered is None:
            return None
        average = block.matrix(self._unscaled(gathered.average(block)))
        return average, _difference(block, average, gathered), gathered.examples(block)

    def _look_for_halves(self, fresh: list[Block], reading: Reading) -> None:
        if not self.settings.needs_halves:
            return
        counts = {block: reading.counts[block] for block in fresh}
        empty = [block for block, count in counts.items() if 0 in (count.first, count.second)]
        if empty:
            self.notices.no_halves(empty, counts[empty[0]].first, counts[empty[0]].second)


def _most_common(numbers: Iterable[float]) -> float:
    """Of several, the largest; 1 if there are none."""
    found = list(numbers)
    return max(found, key=lambda number: (found.count(number), number), default=1.0)


def _covered(blocks: Iterable[Block]) -> dict[Tensor, int]:
    """How many entries of each parameter belong to one of the layers."""
    covered: dict[Tensor, int] = {}
    for block in blocks:
        for own in block.slices:
            covered[own.parameter] = covered.get(own.parameter, 0) + own.shape.numel()
    return covered


def _difference(block: Block, average: Tensor, gathered: Gathered) -> Tensor | None:
    return block.difference(
        average, gathered.signed(block), gathered.examples(block), gathered.rescaling(block)
    )
