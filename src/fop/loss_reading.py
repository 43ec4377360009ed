"""Which likelihood the user's loss is of, from the model's output z and the gradient g there.

Nothing is guessed: all of g must be explained by a few numbers, or the reason why not is returned.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fop.likelihood import Bernoulli, Categorical, Gaussian, Reading, working


def read(z: Tensor, g: Tensor, *, candidates: Iterable[Tensor] = ()) -> Reading | str:
    """The likelihood that explains the gradient g at z, or the reason why none is found.

    A squared error needs `candidates`: tensors that may be its residual z - t, or its target t.
    """
    precision = Precision.of(z, g)
    z, g = working(z.detach()), g.detach().to(working(z).dtype)
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


# So many entries find the scale of soft targets; all of them confirm it.
SAMPLE = 1 << 20


@dataclass(frozen=True)
class Precision:
    """How well z and g are known."""

    tolerance: float  # of g, relative
    eps: float  # rounding inside of the loss, which torch computes in float32 at least
    floor: float  # half of the smallest number, which relative errors can't be smaller than
    evidence: int  # how many numbers must be explained beyond those that are fitted
    sure: float  # a sigmoid this far from 0 and 1 is precise

    @staticmethod
    def of(z: Tensor, g: Tensor) -> Precision:
        """That of the coarsest type involved, also where g was computed in it and cast since."""
        types = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
        coarse = g.dtype
        for kind in types[types.index(g.dtype) + 1 :]:
            if bool((g.to(kind) == g).all()):
                coarse = kind
        if coarse == torch.float64:
            return Precision(1e-10, 2e-16, 0.0, 2, 1e-5)
        if coarse == torch.float32 and z.dtype in types[:2]:
            return Precision(2e-5, 1e-7, 1e-44, 2, 5e-3)
        if torch.bfloat16 in (coarse, z.dtype):
            return Precision(6e-3, 1e-7, 1e-40, 8, 0.1)
        return Precision(1e-3, 1e-7, 6e-8, 8, 0.1)


def _categorical(log_p: Tensor, g: Tensor, precision: Precision) -> tuple[Tensor, bool] | str:
    """Scale [rows, 1] for rows [rows, classes], and whether it is certain."""
    size, p = g.abs().sum(-1), log_p.exp()
    # The loss adds up over the classes, one after the other.
    adding = 0.05 * precision.eps * g.shape[-1]
    precision = replace(precision, tolerance=precision.tolerance + adding)
    # A label's gradient is rounded as its probability is, which is 1 late in training.
    s = (g.clamp_min(0) * p).sum() / (p * p * (g > 0)).sum()
    rounding = 4 * precision.eps * torch.maximum(s, size.max())
    slack = precision.tolerance * size + rounding + g.shape[-1] * precision.floor
    if bool((g.sum(-1).abs() > slack).any()):
        return "no softmax or sigmoid: the gradient does not add up to 0 over the classes"
    live = size > 0
    if not bool(live.all()):
        log_p, g = log_p[live], g[live]
    found = _hard_labels(log_p, g, precision)
    if isinstance(found, str):
        soft = _soft_labels(log_p, g, precision)
        if isinstance(soft, str):
            return found if "row" in found or "few" in found else soft
        found = soft
    scale = torch.zeros_like(size).masked_scatter(live, found[0].flatten())
    # Where rows are all alike, a scale that depends on how well they are predicted is constant.
    label = g.argmin(-1, keepdim=True)
    right, wrong = log_p.gather(-1, label), log_p.scatter(-1, label, -torch.inf).logsumexp(-1)
    spread = torch.maximum(right.max() - right.min(), wrong.max() - wrong.min())
    differ = bool(spread > 100 * precision.tolerance)
    return scale[:, None], found[1] and differ


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
    highest = log_p.masked_fill(~other, -torch.inf).max()
    certain = bool(highest - log_p.min() > 100 * precision.tolerance)
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
    every = max(1, g.numel() // SAMPLE)
    all_rows, log_p, g = (log_p, g), log_p[::every], g[::every]
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
            rest = mean_p - mean_g / s
            labels, fits = _fits_soft_labels(log_p, g, s, rest, precision)
            if fits and (every == 1 or _fits_soft_labels(*all_rows, s, rest, precision)[1]):
                few = count * (classes - 2) < 4 * precision.evidence
                return "too few entries" if few else (s.expand(count, 1), True)
    return reason


def _fits_soft_labels(
    log_p: Tensor, g: Tensor, s: Tensor, rest: Tensor, precision: Precision
) -> tuple[Tensor, bool]:
    """The two likeliest labels of every row, and whether `rest` is the target of all others."""
    p = log_p.exp()
    t = p - g / s
    labels = t.topk(2).indices
    bound = precision.tolerance * ((1 - log_p) * p + rest.abs() + precision.eps)
    wrong = ((t - rest).abs() > bound).scatter(-1, labels, False)
    wrong |= (t < -bound) | (t > 1 + bound)
    return labels, bool(s > 0) and not bool(wrong.any())


def _bernoulli(z: Tensor, g: Tensor, precision: Precision) -> Reading | str:
    """s is the least that puts all targets into [0, 1]; those that are 0 or 1 must confirm it."""
    p, q = z.sigmoid(), (-z).sigmoid()
    far = torch.where(g > 0, p, q)
    known = (far > precision.sure) & (g != 0)
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
