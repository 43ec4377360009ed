"""Why a step was what it was: coefficients, KL terms with the paper's bounds, spectra, noise scale.

The coefficients of the last step are kept at no cost. Everything else is worked out here, on
demand and in float64, from the gradients and the recorded difference; both are gone after
`zero_grad()`, so ask between `step()` and `zero_grad()`, or those entries are NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from fop import scaling
from fop.curvature.base import Spectrum
from fop.layer import Layer
from fop.optimizer import SecondOrderOptimizer
from fop.step import Engine

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
                                                 half-batches
        kl_base, kl_cross, kl_orthogonal         terms of |F^1/2 u|^2 = eta^2 (a'Qa + 2 beta a'Qp +
                                                 beta^2 p'Qp), before the KL clip
        kl_cross_bound, kl_orthogonal_bound      the paper's bounds of the last two; proven for
                                                 damping_mode="exact"
        input_condition, output_condition        condition numbers of the factors, damped if
                                                 damping_mode="factored"
        condition                                of M

    The last three lines and `orthogonal_norm`, `update_norm` need an eigendecomposition of the
    layer's factors: narrow `layers` for large models. What is not known (no curvature, no
    half-batches, gradients zeroed) is NaN. With several ranks, each reports the layers whose
    curvature it keeps.
    """
    engine = _engine_of(optimizer)
    report = {}
    for layer in engine.layers:
        found = engine.coefficients(layer) if fnmatchcase(layer.name, layers) else None
        if found is None:
            continue
        state = layer.state_in(optimizer.state)
        entry = dict.fromkeys((*GRADIENT_KEYS, *KL_KEYS, *SPECTRUM_KEYS), math.nan)
        entry |= {name: float(getattr(found, name)) for name in ("s", "beta", "eta", "cos2")}
        entry["damping"] = float(state.get("damping", math.nan))
        entry["kl_clip_factor"] = 1.0 if engine.clip is None else float(engine.clip)
        gradients = _Gradients.of(layer, engine)
        if gradients is not None:
            entry |= gradients.terms()
        spectrum = layer.curvature.spectrum(state, layer.shape) if "damping" in state else None
        if spectrum is not None:
            entry |= _conditions(spectrum)
            if gradients is not None:
                entry |= _kl_terms(spectrum, gradients, entry)
        report[layer.name] = entry
    return report


def noise_scale(optimizer: SecondOrderOptimizer) -> float:
    """The gradient noise scale tr(Sigma) / |G|^2 in examples, over all preconditioned layers.

    Batches far below it are noisy, far above it wasteful (McCandlish et al. 2018). Ask between
    backward and `zero_grad()`; with several ranks, on all of them and after `step()`. NaN if there
    are no two half-batches. One step's estimate is noisy itself: average over several.
    """
    engine = _engine_of(optimizer)
    sums = [0.0] * 5  # squares of averages and differences; examples of both half-batches; layers
    for layer in engine.layers:
        found = _Gradients.of(layer, engine)
        if found is not None and found.difference is not None:
            squares = [float(v.square().sum()) for v in (found.average, found.difference)]
            terms = [*squares, *found.examples, 1.0]
            sums = [total + term for total, term in zip(sums, terms, strict=True)]
    numbers = engine.ranks.all_sum(torch.tensor(sums, dtype=torch.float64), "diagnostics")
    of_average, of_difference, first, second, layers = numbers.tolist()
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


@dataclass(frozen=True)
class _Gradients:
    """a and d of a layer in float64, and the examples in the two half-batches."""

    average: Tensor
    difference: Tensor | None
    examples: tuple[int, int]

    @classmethod
    def of(cls, layer: Layer, engine: Engine) -> _Gradients | None:
        """None where they are gone, or on another rank."""
        found = engine.gradients(layer)
        if found is None:
            return None
        (a, d), (first, second) = found
        return cls(a.double(), None if d is None else d.double(), (int(first), int(second)))

    def terms(self) -> dict[str, float]:
        a = float(self.average.norm())
        if self.difference is None:
            return {"gradient_norm": a}
        d = float(self.difference.norm())
        noise = scaling.noise_scale(a**2, d**2, *self.examples) if all(self.examples) else math.nan
        return {"gradient_norm": a, "difference_norm": d, "noise_scale": noise}


def _conditions(spectrum: Spectrum) -> dict[str, float]:
    spectra = (spectrum.input_values, spectrum.output_values, spectrum.damped.flatten(1))
    # A layer with groups has several; the worst one counts.
    worst = [float((values.amax(-1) / values.amin(-1)).max()) for values in spectra]
    return dict(zip(SPECTRUM_KEYS, worst, strict=True))


def _kl_terms(
    spectrum: Spectrum, gradients: _Gradients, scalars: dict[str, float]
) -> dict[str, float]:
    s, beta, eta, damping = (scalars[name] for name in ("s", "beta", "eta", "damping"))
    fisher, damped, d = spectrum.fisher, spectrum.damped, gradients.difference
    a = spectrum.to_basis(gradients.average)
    p = torch.zeros_like(a) if d is None else spectrum.to_basis(d) - s * a
    metric = fisher / damped**2  # Q
    largest = float(fisher.max())
    # Directions without curvature would make |F^-1/2 g| infinite; a floor at round-off keeps the
    # bound valid and finite.
    floor = max(largest * torch.finfo(torch.float64).eps, torch.finfo(torch.float64).tiny)
    inverse = 1 / fisher.clamp(min=floor)
    root_a, root_p = (math.sqrt(float((inverse * v * v).sum())) for v in (a, p))
    return {
        "orthogonal_norm": float(p.norm()),
        "update_norm": abs(eta) * float(((a + beta * p) / damped).norm()),
        "kl_base": eta**2 * float((metric * a * a).sum()),
        "kl_cross": eta**2 * 2 * beta * float((metric * a * p).sum()),
        "kl_orthogonal": eta**2 * beta**2 * float((metric * p * p).sum()),
        "kl_cross_bound": eta**2 * 2 * abs(beta) * largest / damping * root_a * root_p,
        "kl_orthogonal_bound": eta**2 * beta**2 * largest / (4 * damping) * root_p**2,
    }
