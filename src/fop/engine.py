"""One step over all layers, in the order the data flows.

    gradients -> are they sound? -> curvature, when due -> projection -> KL clip -> parameters

Whether a step is sound is decided on the device: an unsound one is carried out with every change
masked, so no scalar has to be read by the host. Only steps that renew curvature read one, because
decompositions need it anyway.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fop.capture import CapturePlan, LayerCapture
from fop.checkpoints import RULE_KEYS, LayerMatrix
from fop.curvature import Curvature, make_curvature
from fop.curvature.base import CurvatureState, PrefixedState, RefreshJob
from fop.layers import Layer
from fop.linalg import all_finite
from fop.moments import FactorSums, factor_dtype
from fop.projection import Coefficients, Metric, fop_update
from fop.rules import adamw_step, momentum_step
from fop.scaling import LossScale, factor_scales, half_difference, square_scale
from fop.settings import Settings
from fop.stagger import phases, refresh_cost

State = MutableMapping[Tensor, dict[str, Any]]
Group = Mapping[str, Any]


@dataclass(frozen=True)
class Block:
    """One preconditioned layer."""

    name: str
    module_name: str
    capture: LayerCapture
    curvature: Curvature

    def ready(self, state: State) -> bool:
        """Whether there is curvature that fits the layer as it is trained at present."""
        own = self.state_in(state) if self.weight in state else {}
        return self.curvature.ready(own, self.capture.shape)

    def state_in(self, state: State) -> CurvatureState:
        """The curvature's part of the optimizer's state."""
        own, prefix = state[self.weight], self.layer.state_prefix
        return PrefixedState(own, prefix) if prefix else own

    @property
    def layer(self) -> Layer:
        return self.capture.layer

    @property
    def shape(self) -> tuple[int, int]:
        return self.capture.shape

    @property
    def weight(self) -> nn.Parameter:
        return self.capture.weight

    def refresh_cost(self, settings: Settings) -> float:
        rows, columns = self.capture.shape
        widest = settings.max_factor_size
        factors = [(rows, rows > widest), (columns, self.layer.indexed or columns > widest)]
        return refresh_cost(factors, self.layer.groups)

    def average(self, gradients: Mapping[Tensor, Tensor]) -> Tensor:
        """The ordinary gradient as the layer's matrix, in the precision of the curvature."""
        dtype = factor_dtype(self.weight.dtype)
        bias, layer = self.capture.bias, self.layer
        of_bias = None
        if bias is not None:
            of_bias = layer.own_bias(gradients.get(bias, torch.zeros_like(bias))).to(dtype)
        return layer.to_matrix(layer.own_weight(gradients[self.weight]).to(dtype), of_bias)

    def difference(self, average: Tensor, loss_scale: LossScale | None) -> Tensor | None:
        """g1 - g2 on the scale of the gradient; None if one half has no examples."""
        capture = self.capture
        first, second = capture.examples
        if capture.signed is None or first == 0 or second == 0:
            return None
        signed = self.layer.to_matrix(*_pair([part.to(average.dtype) for part in capture.signed]))
        rescale = capture.gradient_ratio()
        if loss_scale is not None and loss_scale.inverse is not None:
            rescale = rescale * loss_scale.inverse.to(rescale)
        return half_difference(average, signed, first, second, rescale.to(signed))

    def write(
        self, matrix: Tensor, updates: dict[Tensor, Tensor], gradients: Mapping[Tensor, Tensor]
    ) -> None:
        """Enter the layer's matrix into the updates of its trained parameters.

        What of a parameter belongs to other layers keeps its own update, or else its gradient.
        """
        layer, bias = self.layer, self.capture.bias
        owned = [(self.weight, layer.own_weight)]
        owned += [(bias, layer.own_bias)] if bias is not None else []
        shapes = _pair([part_of(parameter) for parameter, part_of in owned])
        parts = layer.from_matrix(matrix, *shapes)
        for (parameter, part_of), part in zip(owned, parts, strict=True):
            if part.shape == parameter.shape:
                updates[parameter] = part.to(parameter.dtype)
            else:
                if parameter not in updates:
                    rest = gradients.get(parameter, torch.zeros_like(parameter))
                    updates[parameter] = rest.clone()
                part_of(updates[parameter]).copy_(part)


def _refuse_sparse(gradients: Mapping[Tensor, Tensor], options: Mapping[Tensor, Group]) -> None:
    for parameter, gradient in gradients.items():
        if gradient.layout != torch.strided:
            group = options[parameter]
            index = next(i for i, member in enumerate(group["params"]) if member is parameter)
            raise RuntimeError(
                f"parameter {group['param_names'][index]!r} has a sparse gradient, which is not "
                "supported: build its layer with sparse=False"
            )


def _without_unbatched(fresh: list[tuple[Block, FactorSums]]) -> list[tuple[Block, FactorSums]]:
    """Give up embeddings that were called once for the whole batch, as position embeddings are.

    Their output is broadcast over the examples and its gradient summed over them, so nothing of a
    single example is left to build curvature or halves from.
    """
    largest = max((sums.examples / sums.passes for _, sums in fresh), default=1)
    kept = []
    for block, sums in fresh:
        if block.layer.indexed and largest > 1 and sums.examples == sums.passes:
            block.capture.given_up = True
            block.capture.reset()
            warnings.warn(
                f"embedding {block.name!r} is called with one row of indices for the whole batch, "
                "so it sees no single examples: it follows its plain gradient with momentum. Pass "
                f"skip=[{block.name!r}] to train it by the fallback rule. (Said once.)",
                RuntimeWarning,
                stacklevel=5,
            )
        else:
            kept.append((block, sums))
    return kept


def _rounds(
    fresh: list[tuple[Block, FactorSums]],
) -> Iterator[list[tuple[Block, FactorSums]]]:
    """What to renew together: all, for one host read, unless that costs nothing.

    One at a time, sums go and a decomposition replaces its predecessor before the next needs
    memory. The list is emptied.
    """
    one_by_one = all(block.weight.device.type == "cpu" for block, _ in fresh)
    while fresh:
        count = 1 if one_by_one else len(fresh)
        some, fresh[:count] = fresh[:count], []
        yield some


def _pair(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    return tensors[0], tensors[1] if len(tensors) > 1 else None


class Engine:
    """The blocks of one model, and what the last step found out about them."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._curvature = make_curvature(settings.curvature, settings.damping_mode)
        # The blocks of a norm layer are small enough to be damped exactly in any case.
        unitwise = "identity" if settings.curvature == "identity" else "kronecker"
        self._unitwise = make_curvature(unitwise, "exact")
        halves = "samples" if settings.halves == "auto" else settings.halves
        self.plan = CapturePlan(
            halves=halves if settings.needs_halves else "none",
            sharing=settings.sharing,
            max_factor_size=settings.max_factor_size,
            empirical=settings.fisher == "empirical",
            curvature=settings.curvature != "identity",
        )
        self.blocks: list[Block] = []
        self.coefficients: dict[str, Coefficients] = {}
        self.clip: Tensor | None = None
        self.loss_scale: LossScale | None = None
        self._said_no_halves = self._said_unknown_scale = False
        self._said_bypassed = self._said_unexplained = False
        self._solves = 1  # with a layer's metric, before it is renewed

    def add(self, name: str, module_name: str, capture: LayerCapture) -> None:
        curvature = self._unitwise if capture.layer.observed else self._curvature
        self.blocks.append(Block(name, module_name, capture, curvature))

    @property
    def curvature_keys(self) -> set[str]:
        """Names of what curvature keeps in the optimizer's state."""
        return {
            block.layer.state_prefix + key for block in self.blocks for key in block.curvature.keys
        }

    def matrices(self) -> list[LayerMatrix]:
        """The shapes that a state has to fit."""
        return [
            LayerMatrix(
                block.name, block.weight, block.layer.state_prefix, block.layer.groups, *block.shape
            )
            for block in self.blocks
        ]

    def drop_foreign(self, state: State) -> None:
        """Forget what another curvature, or way of damping, has left in a state."""
        known: dict[Tensor, set[str]] = {}
        for block in self.blocks:
            keys = {block.layer.state_prefix + key for key in block.curvature.keys}
            known.setdefault(block.weight, {*RULE_KEYS, "step"}).update(keys)
        for weight, keys in known.items():
            own = state.get(weight, {})
            for key in own.keys() - keys:
                del own[key]

    def prepare(self, next_step: int, state: State, *, retry: bool) -> None:
        """Decide what the backward passes before `next_step` capture."""
        interval = self.settings.interval(next_step)
        self._solves = interval * (2 if self.settings.needs_halves else 1)
        for block, phase in zip(self.blocks, self._phases(interval), strict=True):
            capture = block.capture
            capture.refresh_due = retry or self.settings.refresh_due(next_step, phase)
            capture.saw_empty = capture.saw_examples = False
            capture.replaced = capture.bypassed = False
            capture.curvature_shape = capture.basis = None
            if block.ready(state):
                capture.curvature_shape = capture.shape
                capture.basis = block.curvature.basis(block.state_in(state))

    def _phases(self, interval: int) -> Sequence[int]:
        """By how many steps each block's renewals come after those of the plain schedule."""
        if not self.settings.stagger:
            return [0] * len(self.blocks)
        return phases([block.refresh_cost(self.settings) for block in self.blocks], interval)

    def reset(self) -> None:
        """Forget what was captured, together with the gradients it belongs to."""
        for block in self.blocks:
            block.capture.reset()

    def step(self, groups: Iterable[Group], state: State, loss_scale: LossScale | None) -> bool:
        """Change every parameter that has a gradient; True if curvature must be tried again."""
        options = {parameter: group for group in groups for parameter in group["params"]}
        gradients: Mapping[Tensor, Tensor] = {p: p.grad for p in options if p.grad is not None}
        _refuse_sparse(gradients, options)
        active = [block for block in self.blocks if block.weight in gradients]
        self._check_replaced(gradients)
        self._check_captured(active, state)
        self._follow_parameters(gradients, state)
        self.loss_scale = loss_scale
        captures = [block.capture for block in active]
        empty = any(c.saw_empty for c in captures) and not any(c.saw_examples for c in captures)
        if not gradients or empty:
            return any(block.capture.refresh_due for block in self.blocks)
        healthy = self._healthy(gradients.values(), active)
        gradients = self.unscaled(gradients)
        retry, healthy = self._refresh(active, options, state, healthy)
        updates, alignment = self._precondition(active, gradients, options, state)
        if alignment is not None:
            healthy = healthy & alignment.isfinite()
        decoupled = self.settings.decoupled_weight_decay
        for parameter, gradient in gradients.items():
            group, own, go = options[parameter], state[parameter], healthy.to(parameter.device)
            if group["rule"] == "adamw":
                adamw_step(parameter, gradient, own, group, go)
            else:
                update = updates.get(parameter, gradient)
                momentum_step(parameter, update, own, group, go, decoupled=decoupled)
        return retry

    def unscaled(self, gradients: Mapping[Tensor, Tensor]) -> Mapping[Tensor, Tensor]:
        """Gradients without the loss scale of mixed precision, where they still carry it."""
        if self.loss_scale is None or self.loss_scale.inverse is None:
            return gradients
        inverse = self.loss_scale.inverse
        return {p: grad * inverse.to(grad) for p, grad in gradients.items()}

    def _check_replaced(self, gradients: Mapping[Tensor, Tensor]) -> None:
        for block in self.blocks:
            # A frozen weight has no gradient either, and may be stood in for by functional_call.
            trained = block.weight.requires_grad
            if block.capture.replaced and trained and block.weight not in gradients:
                raise RuntimeError(
                    f"the weight of layer {block.name!r} was replaced by another parameter after "
                    "the optimizer was built, so the new one would not be trained: build the "
                    "optimizer again, or change the weight in place (weight.data.copy_(...))"
                )

    def _follow_parameters(self, gradients: Mapping[Tensor, Tensor], state: State) -> None:
        """Move state along with a model that was moved or cast after the optimizer was built."""
        precise = self.curvature_keys
        for parameter in gradients:
            own = state.get(parameter, {})
            for key, value in own.items():
                if not isinstance(value, Tensor) or key == "step":
                    continue
                dtype = factor_dtype(parameter.dtype) if key in precise else parameter.dtype
                if value.device != parameter.device or value.dtype != dtype:
                    own[key] = value.to(parameter.device, dtype)

    def _check_captured(self, active: list[Block], state: State) -> None:
        if not self.plan.curvature:
            return
        for block in active:
            capture = block.capture
            excused = capture.given_up or (capture.saw_empty and not capture.saw_examples)
            if capture.bypassed and not excused and block.ready(state):
                self._say_bypassed(block)
            if not (capture.has_sums() or excused or block.ready(state)):
                raise RuntimeError(
                    f"layer {block.name!r} has a gradient, but no backward pass through the module "
                    "was seen, so there is no curvature to precondition it with. Either the model "
                    "was compiled by torch.compile and called before the optimizer was built, or "
                    "one like it was, and its graph has no hooks (build the optimizer first, or "
                    "call torch.compiler.reset()), or its weight is used without the module "
                    "(F.linear(x, layer.weight), a fused kernel), or .grad was set by hand, or, "
                    'with fisher="mc" or "exact", the model given to the optimizer was not called. '
                    f"Call the module, or pass skip=[{block.module_name!r}] to use the fallback "
                    "rule."
                )

    def _healthy(self, gradients: Iterable[Tensor], active: list[Block]) -> Tensor:
        """Whether everything this step rests on is finite: a 0-dimensional flag on the device."""
        tensors = list(gradients)
        for block in active:
            tensors += block.capture.tensors()
        healthy = all_finite(tensors)
        if self.loss_scale is not None:
            healthy = healthy & (self.loss_scale.found_inf.to(healthy.device) == 0)
        return healthy

    def _refresh(
        self, active: list[Block], options: Mapping[Tensor, Group], state: State, healthy: Tensor
    ) -> tuple[bool, Tensor]:
        """Take the captured sums into the curvature.

        True if that has to be repeated; and whether the step, with the factors, is sound.
        """
        fresh = _without_unbatched(
            [(block, sums) for block in active if (sums := block.capture.take_sums()) is not None]
        )
        if not fresh:
            return False, healthy
        for block, sums in fresh:
            self._scale(block, sums)
        factors = [t for _, sums in fresh for t in sums.bounds()]
        healthy = healthy & all_finite(factors).to(healthy.device)
        if not bool(healthy):
            return True, healthy
        self._say_unexplained([block for block, _ in fresh])
        failed = []
        for some in _rounds(fresh):
            failed += self._renew(some, options, state)
        if failed:
            warnings.warn(
                f"the curvature of {', '.join(repr(block.name) for block in failed)} could not be "
                "inverted, not even in float64 with more damping: the previous inverse is used "
                "where there is one, else the plain gradient. If this repeats, raise damping.",
                RuntimeWarning,
                stacklevel=4,
            )
        return bool(failed), healthy

    def _renew(
        self, fresh: list[tuple[Block, FactorSums]], options: Mapping[Tensor, Group], state: State
    ) -> list[Block]:
        """Factors into moving averages, and those into metrics; the layers where that failed."""
        jobs: dict[Curvature, list[tuple[Block, RefreshJob]]] = {}
        for block, sums in fresh:
            own, decay = block.state_in(state), self.settings.factor_decay
            block.curvature.absorb(own, sums.inputs, sums.outputs, decay)
            if sums.squares is not None:
                block.curvature.absorb_squares(own, sums.squares, decay)
            job = RefreshJob(own, options[block.weight]["damping"], self._solves)
            jobs.setdefault(block.curvature, []).append((block, job))
        failed = []
        for curvature, pairs in jobs.items():
            done = curvature.refresh([job for _, job in pairs])
            failed += [block for (block, _), fine in zip(pairs, done, strict=True) if not fine]
        self._restart(failed, dict(fresh), state)
        return failed

    def _restart(
        self, failed: list[Block], fresh: Mapping[Block, FactorSums], state: State
    ) -> None:
        """Start moving averages anew that hold something not finite, which would never fade."""
        for block in failed:
            batch = {"input_factor": fresh[block].inputs, "output_factor": fresh[block].outputs}
            own = block.state_in(state)
            if not bool(all_finite([own[key] for key in batch])):
                own.update({key: factor.clone() for key, factor in batch.items()})

    def _scale(self, block: Block, sums: FactorSums) -> None:
        """Make a batch's raw sums its Kronecker factors, in place."""
        settings = self.settings
        # Extra passes differentiate each example's own loss, unscaled; training passes
        # differentiate the user's.
        empirical = self.plan.empirical
        reduction = settings.loss_reduction if empirical else "sum"
        of_inputs, of_outputs = factor_scales(
            examples=sums.examples,
            rows=sums.rows,
            sharing=settings.sharing,
            reduction=reduction,
        )
        sums.inputs.mul_(of_inputs)
        quadratic = [sums.outputs] if sums.squares is None else [sums.outputs, sums.squares]
        if empirical and self.loss_scale is not None:
            if self.loss_scale.measured and block.capture.gradient_touched():
                self._say_unknown_scale()
            scale = self.loss_scale.of_captured(block.capture.gradient_ratio())
            torch._foreach_mul_(quadratic, scale.to(sums.outputs) ** 2)  # first: it only shrinks
        sums.outputs.mul_(of_outputs)
        if sums.squares is not None:
            sums.squares.mul_(square_scale(examples=sums.examples, reduction=reduction))

    def _precondition(
        self,
        active: list[Block],
        gradients: Mapping[Tensor, Tensor],
        options: Mapping[Tensor, Group],
        state: State,
    ) -> tuple[dict[Tensor, Tensor], Tensor | None]:
        """Updates of the layers' parameters, clipped together, and the sum the clip rests on."""
        directions: list[tuple[Block, Tensor]] = []
        alignments: list[Tensor] = []
        self.coefficients, self.clip = {}, None
        for block in active:
            if block.ready(state):
                metric = block.curvature.metric(block.state_in(state))
                update, found = self._direction(block, gradients, metric)
                directions.append((block, update))
                self.coefficients[block.name] = found
                alignments.append(found.update_alignment * options[block.weight]["lr"] ** 2)
        if not directions:
            return {}, None
        alignment = torch.stack([term.to(alignments[0]) for term in alignments]).sum()
        if self.settings.kl_clip is not None:
            self.clip = (self.settings.kl_clip / alignment.abs()).sqrt().clamp(max=1.0)
        updates: dict[Tensor, Tensor] = {}
        for block, update in directions:
            if self.clip is not None:
                update.mul_(self.clip.to(update))
            block.write(update, updates, gradients)
        return updates, alignment

    def _direction(
        self, block: Block, gradients: Mapping[Tensor, Tensor], metric: Metric
    ) -> tuple[Tensor, Coefficients]:
        settings = self.settings
        average = block.average(gradients)
        difference = None
        if settings.needs_halves:
            difference = block.difference(average, self.loss_scale)
            if difference is None:
                self._say_no_halves(block)
        return fop_update(
            average, difference, metric, settings.beta, settings.eta, settings.total_weight
        )

    def _say_unknown_scale(self) -> None:
        if self._said_unknown_scale:
            return
        self._said_unknown_scale = True
        warnings.warn(
            "gradients were changed (clipped, say) after GradScaler.unscale_(), so the loss scale "
            "of this step can't be told from the change, and the curvature shrinks with the "
            "square of a clip. Set optimizer.grad_scaler = scaler once, where optimizer is the "
            "fop optimizer itself. (Said once.)",
            RuntimeWarning,
            stacklevel=5,
        )

    def _say_bypassed(self, block: Block) -> None:
        if self._said_bypassed:
            return
        self._said_bypassed = True
        warnings.warn(
            f"layer {block.name!r} has a gradient that came without a call of the module (its "
            "weight was used directly, or is now computed by a parametrization or pruning), so its "
            "curvature is not renewed and its halves are not known: call the module, or build the "
            f"optimizer again, with skip=[{block.name!r}] if need be. (Said once.)",
            RuntimeWarning,
            stacklevel=5,
        )

    def _say_unexplained(self, blocks: list[Block]) -> None:
        """Notice a weight that is also used without its module, within one backward pass."""
        shares = {b: share for b in blocks if (share := b.capture.take_unexplained()) is not None}
        if self._said_unexplained or not shares:
            return
        values = torch.stack([share.cpu() for share in shares.values()]).tolist()
        for block, share in zip(shares, values, strict=True):
            # Several calls may be added up in another order than autograd's.
            if share > torch.finfo(block.weight.dtype).eps ** 0.4:
                self._said_unexplained = True
                warnings.warn(
                    f"the gradient of layer {block.name!r} is not what the calls of its module "
                    "gave it: its weight is also used without the module (F.linear(x, "
                    "layer.weight), say), or a hook changes its gradient. Curvature and halves "
                    "know the calls alone. Call a module that shares the weight instead, or pass "
                    f"skip=[{block.name!r}]. (Said once.)",
                    RuntimeWarning,
                    stacklevel=5,
                )
                return

    def _say_no_halves(self, block: Block) -> None:
        if self._said_no_halves:
            return
        self._said_no_halves = True
        first, second = block.capture.examples
        warnings.warn(
            f"layer {block.name!r} saw {first} and {second} examples in the two halves of this "
            "step's batch: with an empty half there is nothing to project, and such steps are KFAC "
            'steps. Use at least two examples a step, or, with halves="microbatches", two backward '
            "passes. (Said once.)",
            RuntimeWarning,
            stacklevel=5,
        )
