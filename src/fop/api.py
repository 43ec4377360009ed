"""`FOP` and `KFAC`: what users build, with all arguments in sight."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from fop.curvature import Curvature
from fop.optimizer import SecondOrderOptimizer
from fop.projection import Coefficient
from fop.rules import DampingRule, RelativeDamping, StepRule
from fop.scaling import Number
from fop.settings import Fallback, Fisher, Interval, Schedule, Settings, Skip

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class FOP(SecondOrderOptimizer):
    """KFAC, and the Fisher-orthogonal part of how the two half-batches differ.

    Replaces any torch.optim optimizer in an ordinary loop: `optimizer = fop.FOP(model, lr=0.1)`.
    Linear layers, convolutions, embeddings and the projections of nn.MultiheadAttention are
    preconditioned, all other parameters follow `fallback`; print the optimizer to see which.

    Args:
        model: The model to train (the module, not its parameters).
        lr: Learning rate, a number or a tensor. While the KL clip is active, `kl_clip` sets the
            length of a step, and lr what share of it is taken: all of it at this lr (or at a
            larger one of a scheduler), a tenth of it at a tenth of this lr.
        momentum: As in torch.optim.SGD; the velocity is kept as a displacement, so that a change of
            lr does not rescale it.
        weight_decay: As in torch.optim.SGD.
        nesterov: As in torch.optim.SGD.
        decoupled_weight_decay: Shrink the weights directly, as AdamW does, instead of adding to the
            update.
        damping: lambda, added to the curvature before it is inverted: a number, or a rule that
            gives each layer its own, as `fop.rules.RelativeDamping()`.
        damping_mode: "factored" adds it to each Kronecker factor (Cholesky); "exact" to the full
            curvature (eigenvectors; tolerates less: use a 10 to 30 times larger value).
        factor_decay: Weight of the past in the moving averages of the curvature.
        update_every: Steps between refreshes of the curvature, or a function from the step (from 1)
            to that number. {"steps": 10, "stagger": True} spreads the layers over the steps of an
            interval, so that all steps cost about the same; each layer still has its refresh every
            10 steps, and all of them on steps 1, 2 and 4. With "mc" and "exact" every step that
            refreshes a layer needs the extra backward.
        fisher: "empirical" takes it from the training loss's own backward; "mc" samples labels from
            the model, one extra backward when the curvature is refreshed; "exact" takes all labels,
            one extra backward each. These two are of classes unless said otherwise, as in
            {"name": "mc", "likelihood": "gaussian"} (or "bernoulli"), and find the logits in what
            the model returns: a tensor as it is, `.logits` or ["logits"], or the only tensor with
            two dimensions or more; "model_output" in the dict is a function that picks another.
        sharing: How weights shared over positions count: "expand" (every position on its own) or
            "reduce" (summed per example).
        max_factor_size: Widest Kronecker factor to be kept in full. A wider one (a vocabulary, say)
            is kept as its diagonal, so that memory stays bounded.
        beta: Weight of the orthogonal part: "adaptive" or a number.
        eta: Step size of each layer: "adaptive" or a number.
        total: Whether eta aims at the mean ("mean") or the sum ("sum", twice the step) of the
            half-batches' losses.
        kl_clip: Largest KL divergence, roughly, that a step may cause; None for no limit. Or a
            rule for the length of steps, a `fop.rules.StepRule`.
        loss_reduction: Whether the loss is the "mean" or the "sum" over the examples of a step.
        halves: "samples" splits every micro-batch, "microbatches" takes alternate backward passes,
            "ranks" takes even and odd ranks. "auto" is "ranks" with several of them, else
            "samples".
        curvature: "kronecker"; "ekfac" for eigenvalues corrected in the Kronecker basis, damped
            exactly whatever `damping_mode` is (with several ranks, it needs strategy="all");
            "diagonal" for the diagonal of the Fisher; "identity" for none. Or a
            `fop.curvature.Curvature` of your own.
        fallback: Optimizer for all other parameters: "adamw", or "sgd" with the momentum above. A
            dict has its options: {"name": "adamw", "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
            are the defaults, {"name": "sgd", "lr": 0.05} an SGD that does not take `lr`. This
            learning rate holds while `lr` is as given here, and follows its schedule in proportion.
        norms: Normalisation layers use the "fallback", or are preconditioned "unitwise": with the
            exact curvature of each scale and shift, a 2 x 2 matrix.
        strategy: How several ranks share curvature. "owner": each layer's is kept and used by one
            of them (least memory); "all": by every rank (least latency); a number k: by one of
            every k, say, those of a host.
        process_group: The ranks that train this model together; None for all of them, or those of
            DistributedDataParallel.
        skip: Layers to leave to the fallback: name patterns, module types or modules.
        param_groups: Dicts with "names" (patterns of parameter or layer names) or "params", and
            their own lr, momentum, weight_decay, nesterov, damping or fallback_lr. Parameters in
            none of them form a group of their own. Weight and bias of a layer may be in two groups:
            each has its own options, but for what belongs to the layer, its damping and
            its term of the KL clip, which are the weight's.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: Number = 0.1,
        *,
        momentum: float = 0.7,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        decoupled_weight_decay: bool = False,
        damping: float | DampingRule = RelativeDamping(),  # noqa: B008 (frozen)
        damping_mode: Literal["factored", "exact"] = "factored",
        factor_decay: float = 0.95,
        update_every: Interval | Schedule = 10,
        fisher: Literal["auto", "empirical", "mc", "exact"] | Fisher = "auto",
        sharing: Literal["expand", "reduce"] = "expand",
        max_factor_size: int = 8192,
        beta: Coefficient = "adaptive",
        eta: Coefficient = "adaptive",
        total: Literal["mean", "sum"] = "mean",
        kl_clip: float | Literal["auto"] | StepRule | None = "auto",
        loss_reduction: Literal["mean", "sum"] = "mean",
        halves: Literal["auto", "samples", "microbatches", "ranks"] = "auto",
        curvature: Literal["kronecker", "ekfac", "diagonal", "identity"] | Curvature = "kronecker",
        fallback: Literal["adamw", "sgd"] | Fallback = "adamw",
        norms: Literal["unitwise", "fallback"] = "unitwise",
        strategy: Literal["owner", "all"] | int = "owner",
        process_group: ProcessGroup | None = None,
        skip: Skip | Iterable[Skip] = (),
        param_groups: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__(model, Settings.of(locals()))


class KFAC(SecondOrderOptimizer):
    """`FOP` without the projection: the preconditioned gradient. Arguments as for `FOP`."""

    def __init__(
        self,
        model: nn.Module,
        lr: Number = 0.1,
        *,
        momentum: float = 0.7,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        decoupled_weight_decay: bool = False,
        damping: float | DampingRule = RelativeDamping(),  # noqa: B008 (frozen)
        damping_mode: Literal["factored", "exact"] = "factored",
        factor_decay: float = 0.95,
        update_every: Interval | Schedule = 10,
        fisher: Literal["auto", "empirical", "mc", "exact"] | Fisher = "auto",
        sharing: Literal["expand", "reduce"] = "expand",
        max_factor_size: int = 8192,
        kl_clip: float | Literal["auto"] | StepRule | None = "auto",
        loss_reduction: Literal["mean", "sum"] = "mean",
        curvature: Literal["kronecker", "ekfac", "diagonal", "identity"] | Curvature = "kronecker",
        fallback: Literal["adamw", "sgd"] | Fallback = "adamw",
        norms: Literal["unitwise", "fallback"] = "unitwise",
        strategy: Literal["owner", "all"] | int = "owner",
        process_group: ProcessGroup | None = None,
        skip: Skip | Iterable[Skip] = (),
        param_groups: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__(model, Settings.of(locals(), beta=0.0, eta=1.0))
