"""The likelihoods that losses are of: their curvature at the model's output, and samples of it.

Losses of the form L(z) = sum_i s_i [psi(z_i) - <t_i, z_i>] + const have g_i = s_i (psi'(z_i) - t_i)
and the Hessian s_i psi''(z_i). A row i is a position (categorical) or one entry (the others).
    categorical  psi = logsumexp over the classes   cross_entropy
    bernoulli    psi = softplus                     binary_cross_entropy_with_logits
    gaussian     psi = z^2 / 2                      mse_loss, whose s is 2 / numel
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Generator, Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Categorical:
    """One of the classes along a dimension."""

    dim: int

    def psi(self, z: Tensor) -> Tensor:
        return z.logsumexp(self.dim, keepdim=True)

    def mean(self, z: Tensor) -> Tensor:
        return z.softmax(self.dim)

    def hessian_times(self, z: Tensor, v: Tensor) -> Tensor:
        p = self.mean(z)
        return p * (v - (p * v).sum(self.dim, keepdim=True))

    def sample(self, z: Tensor, generator: Generator | None = None) -> Tensor:
        """Targets drawn from the model, by an exponential race: torch.multinomial reads a flag."""
        p = self.mean(z)
        race = p / torch.empty_like(p).exponential_(generator=generator)
        return torch.zeros_like(p).scatter(self.dim, race.argmax(self.dim, keepdim=True), 1.0)


@dataclass(frozen=True)
class Bernoulli:
    """A coin for every entry."""

    def psi(self, z: Tensor) -> Tensor:
        return functional.softplus(z, threshold=50)

    def mean(self, z: Tensor) -> Tensor:
        return z.sigmoid()

    def hessian_times(self, z: Tensor, v: Tensor) -> Tensor:
        return z.sigmoid() * (-z).sigmoid() * v

    def sample(self, z: Tensor, generator: Generator | None = None) -> Tensor:
        return torch.bernoulli(z.sigmoid(), generator=generator)


@dataclass(frozen=True)
class Gaussian:
    """A normal distribution of variance 1 around every entry."""

    def psi(self, z: Tensor) -> Tensor:
        return z.square() / 2

    def mean(self, z: Tensor) -> Tensor:
        return z

    def hessian_times(self, z: Tensor, v: Tensor) -> Tensor:
        return v

    def sample(self, z: Tensor, generator: Generator | None = None) -> Tensor:
        return z + torch.empty_like(z).normal_(generator=generator)


Likelihood = Categorical | Bernoulli | Gaussian


@dataclass(frozen=True)
class Reading:
    """A likelihood and its scale s, which broadcasts to z; 0 where the loss ignores a row.

    Not certain where all predictions are equal: other losses have the same gradient there.
    """

    likelihood: Likelihood
    scale: Tensor
    certain: bool = True

    def targets(self, z: Tensor, g: Tensor) -> Tensor:
        """What the loss compares psi'(z) with; psi'(z) itself in rows that it ignores."""
        z, s = working(z), self.scale
        return self.likelihood.mean(z) - torch.where(s > 0, g.to(z.dtype) / s, 0.0)

    def change(self, z: Tensor, z2: Tensor, g: Tensor) -> Tensor:
        """L(z2) - L(z), exactly, in float64."""
        z, z2, g, s = z.double(), z2.double(), g.double(), self.scale.double()
        linear = self.likelihood.mean(z) * (z2 - z)
        if isinstance(self.likelihood, Categorical):
            linear = linear.sum(self.likelihood.dim, keepdim=True)
        bregman = self.likelihood.psi(z2) - self.likelihood.psi(z) - linear
        return (g * (z2 - z)).sum() + (s * bregman).sum()

    def hessian_inner(self, z: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """sum_i s_i u_i' H_i v_i, in float64."""
        product = self.likelihood.hessian_times(z.double(), v.double())
        return (self.scale.double() * u.double() * product).sum()


def sampled_gradient(z: Tensor, reading: Reading, generator: Generator | None = None) -> Tensor:
    """Gradient at z whose g g' has diag(s) H as its expectation: labels drawn from the model."""
    work = working(z)
    drawn = reading.likelihood.sample(work, generator)
    return ((reading.likelihood.mean(work) - drawn) * reading.scale.sqrt()).to(z.dtype)


def all_gradients(z: Tensor, reading: Reading, rows: int = 1) -> Iterator[Tensor]:
    """Gradients at z whose g g' add up to diag(s) H for every example, `rows` of dimension 0 each.

    One for every class of every position, or for every feature.
    """
    work, likelihood, root = working(z), reading.likelihood, reading.scale.sqrt()
    examples = z.shape[0] // rows
    if isinstance(likelihood, Categorical):
        p, root = work.movedim(likelihood.dim, -1).softmax(-1), root.movedim(likelihood.dim, -1)
        flat = p.reshape(examples, -1, p.shape[-1])
        root = root.expand(*p.shape[:-1], 1).reshape(examples, -1, 1)
        for position, label in product(*map(range, flat.shape[1:])):
            own, gradient = flat[:, position], torch.zeros_like(flat)
            gradient[:, position] = own
            gradient[:, position, label] -= 1
            gradient[:, position] *= own[:, label : label + 1].sqrt() * root[:, position]
            yield gradient.reshape(p.shape).movedim(-1, likelihood.dim).to(z.dtype)
        return
    deviation = likelihood.hessian_times(work, torch.ones_like(work)).sqrt() * root
    flat = deviation.reshape(examples, -1)
    for feature in range(flat.shape[1]):
        gradient = torch.zeros_like(flat)
        gradient[:, feature] = flat[:, feature]
        yield gradient.reshape(z.shape).to(z.dtype)


def working(z: Tensor) -> Tensor:
    """In a precision to compute with."""
    return z if z.dtype in (torch.float32, torch.float64) else z.float()
