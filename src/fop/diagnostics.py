"""Why a step was what it was: coefficients, KL terms with the paper's bounds, spectra, noise scale.

The coefficients of the last step are at hand at no cost. Everything else is worked out here, on
demand and in float64, from the gradients and the captured difference; both are gone after
`zero_grad()`, so ask between `step()` and `zero_grad()`, or those entries are NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from fop import scaling
from fop.block import Block
from fop.curvature.kronecker import factored_shifts, stored_factors
from fop.engine import Engine
from fop.linalg import Factor
from fop.optimizer import SecondOrderOptimizer
from fop.projection import inner

# Entries that need the gradients, and those that need the factors' eigenvalues.
GRADIENT_KEYS = ("gradient_norm", "difference_norm", "noise_scale")
SPECTRUM_KEYS = ("input_condition", "output_condition", "condition")
KL_KEYS = (
    "orthogonal_norm",
    "update_norm",
    "kl_base",
    "kl_cross",
    "kl_orthogonal",
    "kl_cross_bound",
    "kl_orthogonal_bound",
)


def diagnostics(optimizer: SecondOrderOptimizer, layers: str = "*") -> dict[str, dict[str, float]]:
    """What the last step did to each preconditioned layer whose name matches the pattern `layers`.

    Keys, with a, d, p, Q and so on as in the paper:
        s, beta, eta, cos2                       the projection's scalars; cos2 is the squared
                                                 cosine of a and p under M^-1
        damping, kl_clip_factor                  lambda, and nu, which all layers share
        gradient_norm, difference_norm           Euclidean norms of a and d
        orthogonal_norm, update_norm             of p, and of u before the KL clip
        noise_scale                              gradient noise scale in examples, from the two
                                                 halves
        kl_base, kl_cross, kl_orthogonal         terms of |F^1/2 u|^2 = eta^2 (a'Qa + 2 beta a'Qp +
                                                 beta^2 p'Qp), before the KL clip
        kl_cross_bound, kl_orthogonal_bound      the paper's bounds of the last two; proven for
                                                 damping_mode="exact"
        input_condition, output_condition        condition numbers of the factors, damped if
                                                 damping_mode="factored"
        condition                                of M

    The last three lines and `orthogonal_norm`, `update_norm` need an eigendecomposition of the
    layer's factors: narrow `layers` for large models. What can't be had (no curvature, no halves,
    gradients zeroed) is NaN. With several ranks, each reports the layers whose curvature it keeps.
    """
    engine = _engine_of(optimizer)
    report = {}
    for block in engine.blocks:
        found = engine.coefficients.get(block.name)
        if found is None or not fnmatchcase(block.name, layers):
            continue
        state = block.state_in(optimizer.state)
        entry = dict.fromkeys((*GRADIENT_KEYS, *KL_KEYS, *SPECTRUM_KEYS), math.nan)
        entry |= {name: float(getattr(found, name)) for name in ("s", "beta", "eta", "cos2")}
        entry["damping"] = float(state.get("damping", math.nan))
        entry["kl_clip_factor"] = 1.0 if engine.clip is None else float(engine.clip)
        gradients = _gradients(block, engine)
        if gradients is not None:
            entry |= gradients.terms()
        if "damping" in state:
            spectrum = _spectrum(state, block.shape)
            entry |= spectrum.conditions()
            if gradients is not None:
                entry |= spectrum.kl_terms(gradients.average, gradients.difference, entry)
        report[block.name] = entry
    return report


def noise_scale(optimizer: SecondOrderOptimizer) -> float:
    """The gradient noise scale tr(Sigma) / |G|^2 in examples, over all preconditioned layers.

    Batches far below it are noisy, far above it wasteful (McCandlish et al. 2018). Ask between
    backward and `zero_grad()`; with several ranks, on all of them and after `step()`. NaN if there
    are no two halves. One step's estimate is noisy itself: average over several.
    """
    engine = _engine_of(optimizer)
    sums = [0.0] * 5  # squares of averages and differences; examples in both halves; layers
    for block in engine.blocks:
        found = _gradients(block, engine)
        if found is not None and found.difference is not None:
            squares = [float(inner(v, v)) for v in (found.average, found.difference)]
            terms = [*squares, found.first, found.second, 1.0]
            sums = [total + term for total, term in zip(sums, terms, strict=True)]
    of_average, of_difference, first, second, layers = engine.exchange.sum(sums)
    if not (first and second):
        return math.nan
    examples = round(first / layers), round(second / layers)
    return scaling.noise_scale(of_average, of_difference, *examples)


def _engine_of(optimizer: object) -> Engine:
    if not isinstance(optimizer, SecondOrderOptimizer):
        raise TypeError(
            f"expected a fop.FOP or fop.KFAC optimizer, got {type(optimizer).__name__}: "
            "if a trainer wrapped it, pass the inner one (often wrapped.optimizer)"
        )
    return optimizer._engine


def _gradients(block: Block, engine: Engine) -> _Gradients | None:
    found = engine.recall(block)
    if found is None:
        return None
    average, difference, (first, second) = found
    return _Gradients(
        average.double(),
        None if difference is None else difference.double(),
        int(first),
        int(second),
    )


@dataclass(frozen=True)
class _Gradients:
    """a and d of a layer in float64, and the examples in the two halves."""

    average: Tensor
    difference: Tensor | None
    first: int
    second: int

    def terms(self) -> dict[str, float]:
        terms = {"gradient_norm": float(self.average.norm())}
        if self.difference is not None:
            terms["difference_norm"] = float(self.difference.norm())
            squares = (terms["gradient_norm"] ** 2, terms["difference_norm"] ** 2)
            if self.first and self.second:
                terms["noise_scale"] = scaling.noise_scale(*squares, self.first, self.second)
        return terms


@dataclass(frozen=True)
class _Spectrum:
    """A layer's curvature in its eigenbasis, where F and M act elementwise; float64."""

    input_values: Tensor  # [groups, i]
    output_values: Tensor  # [groups, o]
    enter: Callable[[Tensor], Tensor]
    fisher: Tensor  # [groups, o, i]
    damped: Tensor

    def conditions(self) -> dict[str, float]:
        spectra = (self.input_values, self.output_values, self.damped.flatten(1))
        # A layer with groups has several; the worst one counts.
        worst = [float((values.amax(-1) / values.amin(-1)).max()) for values in spectra]
        return dict(zip(SPECTRUM_KEYS, worst, strict=True))

    def kl_terms(
        self, average: Tensor, difference: Tensor | None, scalars: dict[str, float]
    ) -> dict[str, float]:
        s, beta, eta, damping = (scalars[name] for name in ("s", "beta", "eta", "damping"))
        a = self.enter(average)
        p = torch.zeros_like(a) if difference is None else self.enter(difference) - s * a
        metric = self.fisher / self.damped**2  # Q
        largest = float(self.fisher.max())
        # Directions without curvature would make |F^-1/2 g| infinite; a floor at round-off keeps
        # the bound valid and finite.
        floor = max(largest * torch.finfo(torch.float64).eps, torch.finfo(torch.float64).tiny)
        inverse = 1 / self.fisher.clamp(min=floor)
        root_a, root_p = (math.sqrt(float((inverse * v * v).sum())) for v in (a, p))
        return {
            "orthogonal_norm": float(p.norm()),
            "update_norm": abs(eta) * float(((a + beta * p) / self.damped).norm()),
            "kl_base": eta**2 * float((metric * a * a).sum()),
            "kl_cross": eta**2 * 2 * beta * float((metric * a * p).sum()),
            "kl_orthogonal": eta**2 * beta**2 * float((metric * p * p).sum()),
            "kl_cross_bound": eta**2 * 2 * abs(beta) * largest / damping * root_a * root_p,
            "kl_orthogonal_bound": eta**2 * beta**2 * largest / (4 * damping) * root_p**2,
        }


def _spectrum(state: Mapping[str, Any], shape: tuple[int, int]) -> _Spectrum:
    inputs, outputs = (f.to(dtype=torch.float64) for f in stored_factors(state, shape))
    (input_values, input_basis), (output_values, output_basis) = _eigen(inputs), _eigen(outputs)
    fisher = output_values.unsqueeze(-1) * input_values.unsqueeze(-2)
    if "corrected_eigenvalues" in state:  # which belong to just the basis they were measured in
        fisher = state["corrected_eigenvalues"].double()
        input_basis, output_basis = (
            basis if basis is None else basis.double()
            for basis in (state.get("input_basis"), state.get("output_basis"))
        )
    if "input_eigenvalues" in state:  # damping_mode="exact"
        damped = fisher + state["damping"]
    else:
        of_input, of_output = factored_shifts(inputs, outputs, state["damping"])
        input_values = input_values + of_input.unsqueeze(-1)
        output_values = output_values + of_output.unsqueeze(-1)
        damped = output_values.unsqueeze(-1) * input_values.unsqueeze(-2)

    def enter(v: Tensor) -> Tensor:
        v = v if output_basis is None else output_basis.mT @ v
        return v if input_basis is None else v @ input_basis

    return _Spectrum(input_values, output_values, enter, fisher, damped)


def _eigen(factor: Factor) -> tuple[Tensor, Tensor | None]:
    """Eigenvalues and eigenvectors; a diagonal factor needs no change of basis."""
    (values, *vectors), _ = factor.eigenbasis(torch.zeros_like(factor.mean_eigenvalue()))
    return values, vectors[0] if vectors else None
