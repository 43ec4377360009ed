"""The Fisher by extra backwards: labels drawn from the model ("mc") or all of them ("exact").

They run inside the user's own backward, before it goes on from the model's output, and only on
steps that refresh curvature. They go through the same layers and leave second moments, but no
gradients.

Likelihoods match torch's losses, and the Fisher at the output is the expected Hessian of the loss
that is trained. An example's own loss is a sum over its positions (categorical) or features, each
with weight w: one over their number for a mean loss, 1 for a sum loss. So gradients carry sqrt(w).
    categorical  cross_entropy: classes last in [n, c] and [n, s, c], dimension 1 of [n, c, h, w]
    bernoulli    binary_cross_entropy_with_logits
    gaussian     mse_loss, (o - y)^2, whose Hessian is 2
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fop._torch import current_pass
from fop.capture.forwards import Forwards, Inputs
from fop.capture.hooks import InertHook, hooked_by, in_transform
from fop.capture.plan import CapturePlan
from fop.capture.recorder import Recorder
from fop.likelihood import Categorical, Gaussian, Reading
from fop.likelihood import all_gradients as read_gradients
from fop.likelihood import sampled_gradient as read_sample
from fop.loss_graph import squared_scale
from fop.loss_reading import read
from fop.scaling import term_weight

# Fishers of labels that the user asked to be drawn.
SAMPLED = ("mc", "exact")


def sampled_gradient(output: Tensor, likelihood: str, reduction: str, rows: int = 1) -> Tensor:
    """Gradient at the output [n, ...] with labels drawn from the model itself.

    `rows` of dimension 0 belong to each example, one after the other.
    """
    weight = math.sqrt(_term_weight(output, likelihood, reduction, rows))
    if likelihood == "gaussian":
        return torch.randn_like(output) * (math.sqrt(2) * weight)
    if likelihood == "bernoulli":
        probability = output.sigmoid()
        return (probability - torch.bernoulli(probability)) * weight
    probability = _classes_last(output).softmax(-1)
    # An exponential race draws from the classes without the host read of torch.multinomial.
    label = (probability / torch.empty_like(probability).exponential_()).argmax(-1, keepdim=True)
    minus_one = probability.new_full((), -1.0).expand(label.shape)
    gradient = probability.scatter_add(-1, label, minus_one)
    return _classes_back(gradient * weight, output)


def all_gradients(
    output: Tensor, likelihood: str, reduction: str, rows: int = 1
) -> Iterator[Tensor]:
    """Gradients at the output [n, ...] whose g g^T add up to each example's exact Fisher.

    One for every class of every position, or for every feature: as many backwards.
    """
    weight = math.sqrt(_term_weight(output, likelihood, reduction, rows))
    examples = output.shape[0] // rows
    if likelihood == "categorical":
        logits = _classes_last(output)
        probability = logits.softmax(-1).reshape(examples, -1, logits.shape[-1])
        for position, label in product(*map(range, probability.shape[1:])):
            own, gradient = probability[:, position], torch.zeros_like(probability)
            gradient[:, position] = own
            gradient[:, position, label] -= 1
            gradient[:, position] *= own[:, label : label + 1].sqrt() * weight
            yield _classes_back(gradient.reshape(logits.shape), output)
        return
    if likelihood == "gaussian":
        deviation = torch.full_like(output, math.sqrt(2) * weight)
    else:
        probability = output.sigmoid()
        deviation = (probability * (1 - probability)).sqrt() * weight
    flat = deviation.reshape(examples, -1)
    for feature in range(flat.shape[1]):
        gradient = torch.zeros_like(flat)
        gradient[:, feature] = flat[:, feature]
        yield gradient.reshape(output.shape)


def _term_weight(output: Tensor, likelihood: str, reduction: str, rows: int) -> float:
    terms = output[0].numel() * rows
    if likelihood == "categorical":
        terms //= _classes_last(output).shape[-1]
    return term_weight(terms, reduction)


def _classes_last(output: Tensor) -> Tensor:
    shape = tuple(output.shape)
    if len(shape) < 2:
        raise ValueError(
            f"the categorical likelihood needs model outputs [n, classes, ...], got shape {shape}: "
            'choose another, as in fisher={"name": "mc", "likelihood": "gaussian"} (or '
            '"bernoulli"), or "empirical"'
        )
    logits = output if len(shape) <= 3 else output.movedim(1, -1)
    if logits.shape[-1] == 1:
        raise ValueError(
            "the categorical likelihood needs two classes at least, but the model returned "
            f"shape {shape}, which is one class: its Fisher is zero. Choose "
            'another, as in fisher={"name": "mc", "likelihood": "bernoulli"} '
            '(binary_cross_entropy_with_logits) or "gaussian" (mse_loss)'
        )
    return logits


def _classes_back(gradient: Tensor, output: Tensor) -> Tensor:
    return gradient if output.dim() <= 3 else gradient.movedim(-1, 1)


# Forward passes that may wait for their backward at a time; what is older is let go.
WAITING = 8


class ExtraPass:
    """What happens where a backward pass sets out from the model's output.

    The loss's likelihood is read, extra backwards for the Fisher are run, and a part of the forward
    pass is recorded for step rules that run it again. Outputs wait here, and not in the hooks on
    themselves, which would be a cycle that is never freed.
    """

    def __init__(
        self,
        plan: CapturePlan,
        recorders: Sequence[Recorder],
        options: Mapping[str, Any],
        reduction: str,
        forwards: Forwards | None = None,
    ) -> None:
        self._plan = plan
        self._recorders = recorders
        self._name, self._pick = options["name"], options["model_output"]
        self._likelihood, self._reduction = options["likelihood"], reduction
        self.forwards = forwards
        # The outputs, how many rows of each belong to an example, and what the model was given.
        self._waiting: dict[int, tuple[Tensor, int, Inputs | None]] = {}
        self._passes = 0

    def wanting(self) -> list[Recorder]:
        return [
            recorder
            for recorder in self._recorders
            if recorder.wants_moments and recorder.weight.requires_grad and not recorder.inactive
        ]

    def expect(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        """Run once the gradient at the model's output is known, wherever the loss is computed."""
        sampling = self._name != "empirical" and bool(self.wanting())
        if not sampling and self.forwards is None:
            return
        try:
            logits = find_output(module, output, self._pick)
        except TypeError as error:
            if self._name in SAMPLED:
                raise
            if self.forwards is not None:
                self.forwards.unreadable = str(error).partition(":")[0]
            return
        if logits.numel() == 0 or not logits.requires_grad or in_transform(logits):
            return
        if self._name in SAMPLED and self._likelihood == "categorical":
            _classes_last(logits)  # raises, while the user's forward is on the stack
        self._passes += 1
        number, reference = self._passes, weakref.ref(self)

        def reached(grad: Tensor) -> None:
            extra_pass = reference()
            if extra_pass is not None:
                extra_pass._run(number, grad)

        logits.register_hook(reached)
        current, n = self._plan.examples.current, logits.shape[0] if logits.dim() else 1
        size = None if current is None else current.size
        rows = n // size if size and n % size == 0 else 1
        inputs = None
        if self.forwards is not None:
            pick = partial(find_output, module, pick=self._pick)
            divisible = size is not None and n % size == 0
            inputs = Inputs.of(args, kwargs, logits, size if divisible else None, pick)
        self._waiting[number] = logits, rows, inputs
        while len(self._waiting) > WAITING:
            del self._waiting[next(iter(self._waiting))]

    def forget(self) -> None:
        """After a step, forward passes that had no backward are not expected to have one."""
        self._waiting.clear()
        self._plan.empirical = self._name in ("empirical", "auto")
        if self.forwards is not None:
            self.forwards.forget()

    def _run(self, number: int, grad: Tensor) -> None:
        output, rows, inputs = self._waiting.pop(number, (None, 1, None))
        if output is None:
            return
        values, recorders = output.detach(), self.wanting()
        recorders = [] if self._name == "empirical" else recorders
        reading: Reading | str = "not asked for"
        # Reading asks the host. Of classes, the reduction tells all that sampling needs.
        asked = recorders and (self._name == "auto" or self._likelihood != "categorical")
        if asked or self.forwards is not None:
            part = (lambda tensor: tensor) if inputs is None else inputs.part
            reading = read_loss(output, grad, part)
        if self._name == "auto" and recorders:
            # The labels of a class are as good as sampled ones, and cost no backward pass.
            sampled = isinstance(reading, Reading) and not _of_classes(reading)
            self._plan.empirical = not sampled
            recorders = recorders if sampled else []
        if recorders:
            full = reading
            if inputs is not None and isinstance(reading, Reading) and reading.scale.numel() > 1:
                full = read_loss(output, grad)
            self._sample(output, self._gradients(values, full, rows), recorders)
        if self.forwards is not None and inputs is not None:
            self.forwards.add(inputs, values, grad, reading)

    def _gradients(self, values: Tensor, reading: Reading | str, rows: int) -> Iterable[Tensor]:
        """At the output; on the scale of the user's own loss where that could be read."""
        exact, likelihood = self._name == "exact", self._likelihood
        known = isinstance(reading, Reading) and type(reading.likelihood).__name__.lower()
        if isinstance(reading, Reading) and (self._name == "auto" or likelihood in ("auto", known)):
            self._plan.scaled_by_loss = True
            if exact:
                return read_gradients(values, reading, rows)
            return [read_sample(values, reading)]
        self._plan.scaled_by_loss = False
        how = ("categorical" if likelihood == "auto" else likelihood), self._reduction, rows
        return all_gradients(values, *how) if exact else [sampled_gradient(values, *how)]

    def _sample(
        self,
        output: Tensor,
        gradients: Iterable[Tensor],
        recorders: Sequence[Recorder],
    ) -> None:
        plan = self._plan
        weights = list(dict.fromkeys(recorder.in_graph for recorder in recorders))  # may be shared
        plan.extra_pass_of, plan.extra_pass_first = current_pass(), True
        try:
            for gradient in gradients:
                torch.autograd.grad(output, weights, gradient, retain_graph=True, allow_unused=True)
                plan.extra_pass_first = False
                for recorder in recorders:
                    recorder.close_extra_pass()
        finally:
            plan.extra_pass_of = None


def read_loss(
    output: Tensor, gradient: Tensor, part: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> Reading | str:
    """The likelihood of the user's loss, in a hook on the model's output; or why it is unknown.

    Some of the rows tell as much as all of them: `part` takes them.
    """
    scale = squared_scale(output, gradient)
    if isinstance(scale, Tensor):
        return Reading(Gaussian(), scale)
    return read(part(output.detach()), part(gradient))


def _of_classes(reading: Reading) -> bool:
    return isinstance(reading.likelihood, Categorical)


def find_output(module: nn.Module, output: Any, pick: Callable[[Any], Any] | None = None) -> Tensor:
    """The tensor that the likelihood is about: the output itself, its logits, or the only one."""
    if pick is not None:
        picked = pick(output)
        if not isinstance(picked, Tensor):
            raise TypeError(
                f"model_output must return a tensor, but of what {type(module).__name__} returned "
                f"it gave {type(picked).__name__}"
            )
        return picked
    if isinstance(output, Tensor):
        return output
    parts = dict(output) if isinstance(output, Mapping) else {}
    if isinstance(output, (tuple, list)):
        parts = dict(enumerate(output))
    logits = parts.get("logits", getattr(output, "logits", None))
    if isinstance(logits, Tensor):
        return logits
    # A loss beside the logits has no dimensions.
    candidates = [
        part
        for part in parts.values()
        if isinstance(part, Tensor) and part.is_floating_point() and part.dim() > 1
    ]
    if len(candidates) == 1:
        return candidates[0]
    raise TypeError(
        f'fisher="mc" and "exact" need the logits, but {type(module).__name__} returned '
        f"{type(output).__name__} with {len(candidates)} tensors that may be them: pick one, as in "
        'fisher={"name": "mc", "model_output": lambda output: ...}'
    )


class OutputHook(InertHook):
    """The forward hook on the model."""

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if self._run is not None and torch.is_grad_enabled():
            self._run(self, module, args, kwargs, output)

    def run(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        extra_pass = self._owner()
        if extra_pass is not None and not in_transform():
            extra_pass.expect(module, args, kwargs, output)


def hook_output(model: nn.Module, extra_pass: ExtraPass) -> RemovableHandle:
    # Before hooks of the user that change the output, but after that of a layer, which starts a
    # new graph, where the model is one itself.
    prepend = not hooked_by(model)
    return model.register_forward_hook(OutputHook(extra_pass), prepend=prepend, with_kwargs=True)
