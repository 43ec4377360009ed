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

Three two-sided products (F a, M^-1 a, M^-1 d); scalars stay on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fop.settings import Coefficient

# Below this share of q the orthogonal part is round-off, and beta = D / E would be noise.
NEGLIGIBLE = 1e-12


class Metric(Protocol):
    """Curvature of one layer; `enter` is an orthogonal change of basis, `leave` its inverse."""

    def enter(self, v: Tensor) -> Tensor: ...
    def leave(self, v: Tensor) -> Tensor: ...
    def fisher(self, v: Tensor) -> Tensor:
        """F v, in the entered basis."""
        ...

    def solve(self, v: Tensor) -> Tensor:
        """M^-1 v, in the entered basis; the caller may overwrite it."""
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


def orthogonal_part(
    a: Tensor, d: Tensor, fisher_a: Tensor, eps: float = 0.0
) -> tuple[Tensor, Tensor]:
    """s and p = d - s a, where <p, F a> = <d, F a> eps / (<a, F a> + eps) (the paper's Lemma 1)."""
    # F is positive semi-definite, so <a, F a> = 0 means F a = 0: the guard only turns 0 / 0 into 0.
    guard = max(eps, torch.finfo(a.dtype).tiny)
    s = inner(d, fisher_a) / (inner(a, fisher_a) + guard)
    return s, torch.addcmul(d, a, s, value=-1)


def optimal_beta(q: Tensor, D: Tensor, E: Tensor) -> Tensor:
    """D / E, or 0 where the orthogonal part is negligible or the quotient is not finite."""
    beta = D / E
    return torch.where((NEGLIGIBLE * q < E) & beta.isfinite(), beta, 0.0)


def optimal_eta(q: Tensor, D: Tensor, E: Tensor, beta: Tensor, k: float) -> Tensor:
    """k (q + beta D) / (q + 2 beta D + beta^2 E); k itself where the gradient vanishes."""
    square = q + 2 * beta * D + beta**2 * E
    return torch.where(square > 0, k * (q + beta * D) / square, k)


def fop_update(
    a: Tensor, d: Tensor | None, metric: Metric, beta: Coefficient, eta: Coefficient, k: float
) -> tuple[Tensor, Coefficients]:
    """The update u of one layer and its scalars. Without d (no halves) it is k times KFAC."""
    a = metric.enter(a)
    solved = metric.solve(a)
    q = inner(a, solved)
    zero = torch.zeros_like(q)
    s = D = E = zero
    weight = zero
    if d is not None:
        d = metric.enter(d)
        s, p = orthogonal_part(a, d, metric.fisher(a))
        solved_p = metric.solve(d).addcmul_(solved, s, value=-1)
        D, E = inner(a, solved_p), inner(p, solved_p)
        weight = optimal_beta(q, D, E) if beta == "adaptive" else torch.full_like(q, beta)
        solved.addcmul_(solved_p, weight)
    step = optimal_eta(q, D, E, weight, k) if eta == "adaptive" else torch.full_like(q, eta)
    if eta != 1.0:
        solved.mul_(step)
    return metric.leave(solved), Coefficients(s, weight, step, q, D, E)
