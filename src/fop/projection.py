"""The Fisher-orthogonal projection, over any metric, for several layers of one shape at a time.

The paper's Eqs. projection_scalar to eta_l_opt. For each of L layers, stacked along dimension 0:

    a   g_avg, the ordinary gradient               [L groups, o, i]
    d   g_diff = g1 - g2 of the two half-batches   [L groups, o, i]
    F   curvature,  M  damped curvature            given as products F V and M^-1 V
    s     = <d, F a> / <a, F a>                    [L], as all scalars that follow
    p     = d - s a                                F-orthogonal to a
    D, E, q = <a, M^-1 p>, <p, M^-1 p>, <a, M^-1 a>
    beta  = D / E
    c     = a + beta p
    eta   = k <a, M^-1 c> / <c, M^-1 c>            k = 1 for g_tot = g_avg, 2 for g_tot = g1 + g2
    u     = eta M^-1 c                             the update

With M^-1 = R^T S R, all of it in terms of R a and R d: three two-sided products (F a and, in the
worst case, S R a and S R p; in the best, R a, R d and R^T (R c) are half of one each). Scalars stay
on the device.

Example: with F = M = I, a = (1, 0) and d = (1, 1), s = 1 and p = (0, 1), so D = 0, beta = 0, u = a.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, Protocol

import torch
from torch import Tensor

Coefficient = float | Literal["adaptive"]

# Below this share of q the orthogonal part is round-off, and beta = D / E would be noise.
NEGLIGIBLE = 1e-12


class Metric(Protocol):
    """Curvature of stacked layers of one shape, with M^-1 = R^T S R; v is [L groups, o, i]."""

    def to_basis(self, v: Tensor) -> Tensor:
        """R v, or v itself where R is the identity."""
        ...

    def solve(self, v: Tensor) -> Tensor:
        """S v, which the caller may overwrite; v itself only if S is the identity and R is not."""
        ...

    def from_basis(self, v: Tensor) -> Tensor:
        """R^T v, in place or not."""
        ...

    def fisher_product(self, a: Tensor, a_in_basis: Tensor) -> tuple[Tensor, bool]:
        """F a, or R^-T F a where that costs less: true if so, and then for products with R v."""
        ...


@dataclass(frozen=True)
class Coefficients:
    """The scalars of L layers, all [L] on their device; of one of them, 0-dimensional."""

    s: Tensor
    beta: Tensor
    eta: Tensor
    q: Tensor
    D: Tensor
    E: Tensor

    def of_layer(self, index: int) -> Coefficients:
        return Coefficients(*(getattr(self, field.name)[index] for field in fields(self)))

    @property
    def combined_square(self) -> Tensor:
        """<c, M^-1 c>"""
        return self.q + 2 * self.beta * self.D + self.beta**2 * self.E

    @property
    def update_alignment(self) -> Tensor:
        """<u, c>, which the KL clip sums over layers."""
        return self.eta * self.combined_square

    @property
    def difference_square(self) -> Tensor:
        """<d, M^-1 d>"""
        return self.E + 2 * self.s * self.D + self.s**2 * self.q

    @property
    def cos2(self) -> Tensor:
        """Squared cosine between a and p in the M^-1 metric."""
        product = self.q * self.E
        return torch.where(product > 0, self.D**2 / product, 0.0)


def inner(a: Tensor, b: Tensor, layers: int = 1) -> Tensor:
    """<a, b> of each of the stacked layers, [layers]."""
    if layers == 1:
        return torch.dot(a.reshape(-1), b.reshape(-1)).reshape(1)
    product = torch.bmm(a.reshape(layers, 1, -1), b.reshape(layers, -1, 1))
    return product.reshape(layers)


def spread(scalars: Tensor, like: Tensor) -> Tensor:
    """One scalar per layer [L], to be broadcast over stacked matrices [L groups, o, i]."""
    layers, matrices = len(scalars), len(like)
    if layers not in (1, matrices):
        scalars = scalars.repeat_interleave(matrices // layers)
    return scalars.reshape(-1, 1, 1)


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
    layers: int = 1,
) -> tuple[Tensor, Coefficients]:
    """The updates u of stacked layers and their scalars. Without d it is k times KFAC.

    d is overwritten: few matrices are to be alive at a time.
    """
    in_basis = metric.to_basis(a)
    if d is None:
        solved = metric.solve(in_basis)
        q = inner(in_basis, solved, layers)
        s = weight = D = E = torch.zeros_like(q)
    else:
        other = metric.to_basis(d)
        s = a.new_zeros(layers)
        p = other  # of KFAC, which wants to know of its noise alone
        if beta != 0:
            product, by_basis = metric.fisher_product(a, in_basis)
            pair = (in_basis, other) if by_basis else (a, d)
            a_along, d_along = [inner(v, product, layers) for v in pair]
            s = projection_scalar(a_along, d_along)
            p = other.addcmul_(in_basis, spread(s, other), value=-1)
            del product, pair
        del d, other
        solved, solved_p = metric.solve(in_basis), metric.solve(p)
        q, D = inner(in_basis, solved, layers), inner(in_basis, solved_p, layers)
        E = inner(p, solved_p, layers)
        weight = optimal_beta(q, D, E) if beta == "adaptive" else torch.full_like(q, beta)
        if beta != 0:
            solved.addcmul_(solved_p, spread(weight, solved))
    step = optimal_eta(q, D, E, weight, k) if eta == "adaptive" else torch.full_like(q, eta)
    if eta != 1.0:
        solved.mul_(spread(step, solved))
    return metric.from_basis(solved), Coefficients(s, weight, step, q, D, E)
