"""The Fisher-orthogonal projection of one layer, over any metric.

The paper's Eqs. projection_scalar to eta_l_opt:

    a   g_avg, the ordinary gradient               [groups, o, i]
    d   g_diff = g1 - g2 of the batch's halves     [groups, o, i]
    F   curvature,  M  damped curvature            given as products F V and M^-1 V
    s     = <d, F a> / <a, F a>
    p     = d - s a                                F-orthogonal to a
    D, E, q = <a, M^-1 p>, <p, M^-1 p>, <a, M^-1 a>
    beta  = D / E
    c     = a + beta p
    eta   = k <a, M^-1 c> / <c, M^-1 c>            k = 1 for g_tot = g_avg, 2 for g_tot = g1 + g2
    u     = eta M^-1 c                             the update

With M^-1 = R^T S R, all of it in terms of R a and R d: three two-sided products (F a and, in the
worst case, S R a and S R p; in the best, R a, R d and R^T (R c) are half of one each). Scalars stay
on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fop.settings import Coefficient

# Below this share of q the orthogonal part is round-off, and beta = D / E would be noise.
NEGLIGIBLE = 1e-12


@dataclass(frozen=True)
class Gradient:
    """v and R v."""

    given: Tensor
    entered: Tensor


class Metric(Protocol):
    """Curvature of one layer, with M^-1 = R^T S R."""

    def enter(self, v: Tensor) -> Tensor:
        """R v, or v itself where R is nothing."""
        ...

    def solve(self, v: Tensor) -> Tensor:
        """S v, which the caller may overwrite; v itself only if S is nothing and R is not."""
        ...

    def leave(self, v: Tensor) -> Tensor:
        """R^T v, in place or not."""
        ...

    def along_fisher(self, a: Gradient, d: Gradient) -> tuple[Tensor, Tensor]:
        """<a, F a> and <d, F a>"""
        ...


@dataclass(frozen=True)
class Coefficients:
    """One layer's scalars, all 0-dimensional tensors on its device."""

    s: Tensor
    beta: Tensor
    eta: Tensor
    q: Tensor
    D: Tensor
    E: Tensor

    @property
    def combined_square(self) -> Tensor:
        """<c, M^-1 c>"""
        return self.q + 2 * self.beta * self.D + self.beta**2 * self.E

    @property
    def update_alignment(self) -> Tensor:
        """<u, c>, which the KL clip sums over layers."""
        return self.eta * self.combined_square

    @property
    def cos2(self) -> Tensor:
        """Squared cosine between a and p in the M^-1 metric."""
        product = self.q * self.E
        return torch.where(product > 0, self.D**2 / product, 0.0)


def inner(a: Tensor, b: Tensor) -> Tensor:
    return torch.dot(a.reshape(-1), b.reshape(-1))


def projection_scalar(a_along: Tensor, d_along: Tensor, eps: float = 0.0) -> Tensor:
    """s = <d, F a> / (<a, F a> + eps), of these two products.

    With it <d - s a, F a> = <d, F a> eps / (<a, F a> + eps) (the paper's Lemma 1).
    """
    # F is positive semi-definite, so <a, F a> = 0 means F a = 0: the guard only turns 0 / 0 into 0.
    return d_along / (a_along + max(eps, torch.finfo(a_along.dtype).tiny))


def optimal_beta(q: Tensor, D: Tensor, E: Tensor) -> Tensor:
    """D / E, or 0 where the orthogonal part is negligible or the quotient is not finite."""
    beta = D / E
    return torch.where((NEGLIGIBLE * q < E) & beta.isfinite(), beta, 0.0)


def optimal_eta(q: Tensor, D: Tensor, E: Tensor, beta: Tensor, k: float) -> Tensor:
    """k (q + beta D) / (q + 2 beta D + beta^2 E); k itself where the gradient vanishes."""
    square = q + 2 * beta * D + beta**2 * E
    return torch.where(square > 0, k * (q + beta * D) / square, k)


def fop_update(
    a: Tensor,
    d: Tensor | None,
    metric: Metric,
    beta: Coefficient,
    eta: Coefficient,
    k: float,
) -> tuple[Tensor, Coefficients]:
    """The update u of one layer and its scalars. Without d (no halves) it is k times KFAC.

    d is overwritten: few matrices are to be alive at a time.
    """
    entered = metric.enter(a)
    p = None
    s = torch.zeros((), dtype=a.dtype, device=a.device)
    if d is not None:
        other = metric.enter(d)
        gradients = Gradient(a, entered), Gradient(d, other)
        s = projection_scalar(*metric.along_fisher(*gradients))
        p = other.addcmul_(entered, s, value=-1)
        del d, other, gradients
    solved = metric.solve(entered)
    q = inner(entered, solved)
    weight = D = E = torch.zeros_like(q)
    if p is not None:
        solved_p = metric.solve(p)
        D, E = inner(entered, solved_p), inner(p, solved_p)
        weight = optimal_beta(q, D, E) if beta == "adaptive" else torch.full_like(q, beta)
        solved.addcmul_(solved_p, weight)
    step = optimal_eta(q, D, E, weight, k) if eta == "adaptive" else torch.full_like(q, eta)
    if eta != 1.0:
        solved.mul_(step)
    return metric.leave(solved), Coefficients(s, weight, step, q, D, E)
