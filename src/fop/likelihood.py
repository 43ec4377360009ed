"""Which likelihood the user's loss is of, read from the model's output z and the gradient g there.

Losses of the form L(z) = sum_i s_i [psi(z_i) - <t_i, z_i>] + const have g_i = s_i (psi'(z_i) - t_i)
and the Hessian s_i psi''(z_i). A row i is a position (categorical) or one entry (the others).
    categorical  psi = logsumexp over the classes   cross_entropy
    bernoulli    psi = softplus                     binary_cross_entropy_with_logits
    gaussian     psi = z^2 / 2                      mse_loss, whose s is 2 / numel
Nothing is guessed: all of g must be explained by a few numbers, or the reason why not is returned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
        z, s = _working(z), self.scale
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
    work = _working(z)
    drawn = reading.likelihood.sample(work, generator)
    return ((reading.likelihood.mean(work) - drawn) * reading.scale.sqrt()).to(z.dtype)


def all_gradients(z: Tensor, reading: Reading, rows: int = 1) -> Iterator[Tensor]:
    """Gradients at z whose g g' add up to diag(s) H for every example, `rows` of dimension 0 each.

    One for every class of every position, or for every feature.
    """
    work, likelihood, root = _working(z), reading.likelihood, reading.scale.sqrt()
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


def read(z: Tensor, g: Tensor, *, candidates: Iterable[Tensor] = ()) -> Reading | str:
    """The likelihood that explains the gradient g at z, or the reason why none is found.

    A squared error needs `candidates`: tensors that may be its residual z - t, or its target t.
    """
    precision = Precision.of(z, g)
    z, g = _working(z.detach()), g.detach().to(_working(z).dtype)
    if z.shape != g.shape or z.numel() == 0:
        return "output and gradient differ in shape, or are empty"
    if not bool((z.isfinite() & g.isfinite()).all()):
        return "not finite"
    if not bool(g.any()):
        return "the gradient is zero"
    for candidate in candidates:
        scale = _squared(z, g, candidate, precision)
        if scale is not None:
            return Reading(Gaussian(), scale)
    reason = ""
    for dim in sorted({z.dim() - 1, min(1, z.dim() - 1)}, reverse=True):
        if z.dim() and z.shape[dim] > 1:
            rows = [tensor.movedim(dim, -1).reshape(-1, z.shape[dim]) for tensor in (z, g)]
            found = _categorical(rows[0].log_softmax(-1), rows[1], precision)
            if not isinstance(found, str):
                shape = [1 if d == dim else size for d, size in enumerate(z.shape)]
                return Reading(Categorical(dim), found[0].reshape(shape), found[1])
            reason = reason or found
    bernoulli = _bernoulli(z, g, precision)
    return (reason or bernoulli) if isinstance(bernoulli, str) else bernoulli


@dataclass(frozen=True)
class Precision:
    """How well z and g are known: relative tolerance, rounding, smallest number, evidence."""

    tolerance: float
    eps: float
    floor: float
    # How many numbers must be explained beyond those that are fitted.
    evidence: int

    @staticmethod
    def of(z: Tensor, g: Tensor) -> Precision:
        """That of the coarsest type involved, also where g was computed in it and cast since."""
        types = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
        coarse = g.dtype
        for kind in types[types.index(g.dtype) + 1 :]:
            if bool((g.to(kind) == g).all()):
                coarse = kind
        if coarse == torch.float64:
            return Precision(1e-10, 2e-16, 0.0, 2)
        if coarse == torch.float32 and z.dtype in types[:2]:
            return Precision(2e-5, 1e-7, 1e-44, 2)
        return Precision(1e-2, 4e-3, 6e-8 if torch.float16 in (coarse, z.dtype) else 1e-40, 8)


def _working(z: Tensor) -> Tensor:
    return z if z.dtype in (torch.float32, torch.float64) else z.float()


def _categorical(log_p: Tensor, g: Tensor, precision: Precision) -> tuple[Tensor, bool] | str:
    """Scale [rows, 1] for rows [rows, classes], and whether it is certain."""
    size = g.abs().sum(-1)
    # A label's gradient is rounded as its probability is, which is 1 late in training.
    rounding = torch.maximum((g / log_p.exp())[g > 0].median(), size.max()) * precision.eps
    slack = precision.tolerance * size + 4 * rounding + g.shape[-1] * precision.floor
    if bool((g.sum(-1).abs() > slack).any()):
        return "no softmax or sigmoid: the gradient does not add up to 0 over the classes"
    live = size > 0
    log_p, g = log_p[live], g[live]
    found = _hard_labels(log_p, g, precision)
    if isinstance(found, str):
        soft = _soft_labels(log_p, g, precision)
        if isinstance(soft, str):
            return found if "row" in found or "few" in found else soft
        found = soft
    scale = torch.zeros_like(size).masked_scatter(live, found[0].flatten())
    return scale[:, None], found[1]


def _hard_labels(log_p: Tensor, g: Tensor, precision: Precision) -> tuple[Tensor, bool] | str:
    """Every class but the label has g = s p, with one s for all rows, or for each label."""
    p = log_p.exp()
    label = g.argmin(-1)
    other = torch.ones_like(p, dtype=torch.bool).scatter(-1, label[:, None], False)
    bound = precision.tolerance * (1 - log_p) * p

    def explains(s: Tensor) -> bool:
        wrong = (g - s * p).abs() > s * bound + precision.floor
        return bool((s > 0).all()) and not bool((wrong & other).any())

    product, square = (g * p * other).sum(-1), (p * p * other).sum(-1)
    tiny = torch.finfo(p.dtype).tiny
    known = int((other & (g > 0)).sum())
    certain = bool(log_p[other].max() - log_p[other].min() > 100 * precision.tolerance)
    s = (product.sum() / square.sum().clamp_min(tiny)).expand(len(p), 1)
    if explains(s):
        return (s, certain) if known > precision.evidence else "too few entries"
    sums = p.new_zeros(2, p.shape[-1]).index_add(1, label, torch.stack([product, square]))
    s = (sums[0] / sums[1].clamp_min(tiny))[label, None]
    if not explains(s):
        rows = (product / square.clamp_min(tiny))[:, None]
        return "the scale varies from row to row" if explains(rows) else "no softmax of the output"
    labels = len(label.unique())
    if min(len(label), known) - labels < precision.evidence:
        return "too few rows to tell a scale for each label from one for each row"
    return s, certain


def _soft_labels(log_p: Tensor, g: Tensor, precision: Precision) -> tuple[Tensor, bool] | str:
    """g = s (p - t) with one s, and one t but for two classes in a row: smoothing, mixup."""
    count, classes = g.shape
    if classes < 4:
        return "not hard labels, and too few classes to find other targets"
    p = log_p.exp()
    reason = "no softmax of the output, or targets that are not one or two labels, smoothed"
    # Labels have a low gradient or, where they are learned already, a high probability.
    low, likely = g.topk(2, largest=False).indices, p.topk(2).indices
    for labels in [low] if classes < 6 else [torch.cat([low, likely], -1), low]:
        rest = p.new_zeros(())
        for attempt in range(12):
            # The labels first, as one that is taken for another class must not weigh most.
            least = rest.abs() + precision.eps if attempt > 7 else 1 / classes
            w = (p + least).pow(-2).scatter(-1, labels, 0.0)
            w = w / w.sum()
            mean_p, mean_g = (w * p).sum(), (w * g).sum()
            variance = (w * (p - mean_p).square()).sum()
            if not bool(variance.sqrt() > 0.02 * mean_p):
                return "predictions are too uniform to find the scale of soft targets"
            s = (w * (p - mean_p) * (g - mean_g)).sum() / variance
            t, rest = p - g / s, mean_p - mean_g / s
            labels = t.topk(2).indices
            bound = precision.tolerance * ((1 - log_p) * p + rest.abs() + precision.eps)
            wrong = ((t - rest).abs() > bound).scatter(-1, labels, False)
            wrong |= (t < -bound) | (t > 1 + bound)
            if bool(s > 0) and not bool(wrong.any()):
                few = count * (classes - 2) < 4 * precision.evidence
                return "too few entries" if few else (s.expand(count, 1), True)
    return reason


def _bernoulli(z: Tensor, g: Tensor, precision: Precision) -> Reading | str:
    """s is the least that puts all targets into [0, 1]; those that are 0 or 1 must confirm it."""
    p, q = z.sigmoid(), (-z).sigmoid()
    far = torch.where(g > 0, p, q)
    known = (far > precision.eps / precision.tolerance) & (g != 0)
    if int(known.sum()) <= precision.evidence:
        return "too few entries"
    needed = (g.abs() / far)[known]
    s = needed.max()
    for _ in range(2):
        hard = (needed / s - 1).abs() <= 4 * precision.tolerance
        s = needed[hard].median()
    gray = needed[~hard]
    sides = [int((hard & (g[known] > 0)).sum()), int((hard & (g[known] < 0)).sum())]
    if len(gray):
        if precision.evidence > 2:
            return "no sigmoid of the output, or targets between 0 and 1 in low precision"
        if min(sides) <= precision.evidence or sum(sides) < 0.05 * len(needed):
            return "no sigmoid of the output, or two scales"
        some = gray[:: len(gray) // 200 + 1].sort().values
        equal = (some.diff() <= 4 * precision.tolerance * some[1:]).sum()
        if int(equal) > 0.1 * len(some) + 1:
            return "two scales"
    spread = bool(z[known].max() - z[known].min() > 100 * precision.tolerance)
    ignored = (g == 0) & (torch.minimum(p, q) > precision.eps)
    if not spread and bool(ignored.any()):
        return "predictions are too uniform"
    return Reading(Bernoulli(), torch.where(ignored, 0.0, s), spread)


def _squared(z: Tensor, g: Tensor, candidate: Tensor, precision: Precision) -> Tensor | None:
    """s if g = s r, or s (z - r), of a candidate r; 0 where the loss leaves out an entry."""
    if not candidate.is_floating_point() or candidate.device != z.device:
        return None
    r = candidate.detach().to(z.dtype)
    if r.shape != z.shape:
        if r.numel() != z.numel():
            return None
        r = r.reshape(z.shape)
    used = g != 0
    if int(used.sum()) <= precision.evidence:
        return None
    for residual in (r, z - r):
        s = (g * residual)[used].sum() / residual[used].square().sum()
        slack = precision.tolerance * residual.abs() + 8 * precision.eps * (z.abs() + r.abs())
        if bool(s > 0) and not bool(((g / s - residual).abs() > slack)[used].any()):
            return torch.where(used | (residual.abs() <= slack), s, 0.0)
    return None
