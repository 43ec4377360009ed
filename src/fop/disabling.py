"""Layers that turn out not to be what they seemed: found at steps, agreed by ranks, told once.

From then on the fallback optimizer trains them, and autograd alone computes their gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fop.distributed import Batch, Counts
from fop.layer import Layer
from fop.messages import Messages, listed


def disable_unfit(
    layers: Sequence[Layer],
    known: Sequence[Layer],
    batch: Batch,
    ranks: int,
    messages: Messages,
) -> tuple[list[Layer], Mapping[Layer, Counts]]:
    """Of the layers of a step, those that expect moments and may have them, and their counts.

    `known` are all layers of the model.
    """
    if any(x.recorder.seen.foreign or x.recorder.seen.without_forward for x in layers):
        messages.about_gradients(layers)
    expecting = [layer for layer in layers if layer.sample.wants_moments]
    counts = batch.counts() if expecting else {}
    mismatched = [x for x in layers if x.recorder.mismatch and not x.recorder.disabled]
    if mismatched:
        messages.no_examples({layer: layer.recorder.mismatch for layer in mismatched})
    found = [layer for layer in known if _is_unsupported(layer, counts, ranks)]
    if found:
        disable(found)
        messages.unsupported(found)
    if not counts:
        return [], {}
    disable_uncounted(layers, _enabled(expecting), counts, messages)
    disable_never_called(_enabled(expecting), counts, known, messages)
    return _enabled(expecting), counts


def disable(layers: Iterable[Layer]) -> None:
    for layer in layers:
        layer.recorder.disabled = True
        layer.recorder.forget()


def _enabled(layers: Sequence[Layer]) -> list[Layer]:
    return [layer for layer in layers if not layer.recorder.disabled]


def _is_unsupported(layer: Layer, counts: Mapping[Layer, Counts], ranks: int) -> bool:
    """Whether its adapter does not fit what its module computes.

    Ranks agree on that when they read counts; until then nothing is recorded by those that have
    found it.
    """
    recorder = layer.recorder
    found = recorder.unsupported is not None
    if ranks > 1:
        found = layer in counts and counts[layer].unsupported > 0
    if found and recorder.unsupported is None:
        recorder.unsupported = "another rank found that its adapter is wrong"
    return found and not recorder.disabled


def disable_uncounted(
    layers: Sequence[Layer],
    expecting: Sequence[Layer],
    counts: Mapping[Layer, Counts],
    messages: Messages,
) -> None:
    """Layers whose calls had no single examples, on all ranks alike.

    Where the model's inputs do not tell how many examples there are, the layers do: one example per
    backward pass, where most layers saw more, is a call for the whole batch, as position embeddings
    have it. Its output is broadcast over the examples and its gradient summed over them, so nothing
    of a single example is left to build curvature or half-batches from.
    """
    mismatched = [layer for layer in layers if counts[layer].mismatches]
    counted = [x for x in expecting if counts[x].passes and not counts[x].mismatches]
    seen = {layer: counts[layer].examples / counts[layer].passes for layer in counted}
    usual = _most_common(seen.values())
    once = [layer for layer in counted if seen[layer] == 1 < usual]
    if once:
        messages.no_examples(dict.fromkeys(once, (1, usual)))
    disable([*mismatched, *once])
    # A layer that other passes use may well have another average.
    passes = _most_common(counts[layer].passes for layer in counted)
    others = [x for x in counted if counts[x].passes == passes and seen[x] not in (1, usual)]
    if others:
        messages.other_counts({layer: seen[layer] for layer in others}, usual)


def _most_common(numbers: Iterable[float]) -> float:
    """Of several, the largest; 1 if there are none."""
    found = list(numbers)
    return max(found, key=lambda number: (found.count(number), number), default=1.0)


def disable_never_called(
    expecting: Sequence[Layer],
    counts: Mapping[Layer, Counts],
    layers: Sequence[Layer],
    messages: Messages,
) -> None:
    """Layers that are to have their first curvature and have a gradient, but no statistics.

    Raises if that is so of every layer: then the hooks don't work at all.
    """
    never = [
        layer
        for layer in expecting
        if counts[layer].gradients
        and not (counts[layer].examples or layer.ready or _excused(layer, counts[layer]))
    ]
    works = any(counts[layer].examples for layer in expecting) or any(x.ready for x in layers)
    if never and not works:
        names = listed((layer.name for layer in never), limit=3)
        raise RuntimeError(
            f"no backward pass through any layer was seen, but {names} have gradients: there "
            "is nothing to make curvature of. Either the model was called by torch.compile before "
            "the optimizer was built, or one like it was, and its graph has no hooks (build the "
            "optimizer first, or call torch.compiler.reset()), or weights are used without their "
            "modules (F.linear(x, layer.weight)), or .grad was set by hand, or, with "
            'fisher="mc" or "exact", the model given to the optimizer was not called'
        )
    if never:
        disable(never)
        messages.never_called(never)


def _excused(layer: Layer, count: Counts) -> bool:
    """Whether this step's gradient alone is without statistics."""
    return layer.recorder.seen.foreign or bool(count.empty and not count.filled)
