"""What the curvature of a layer costs, in multiply-adds: one model for owners, steps and the bench.

A layer's matrix V [g, o, i] has the factors G [g, o, o] and A [g, i, i]. For one of them, of width
d, beside k = i or o on the other side of V, and blocks of height b:

    second moments    g n t(d)             of n rows: t(d) = d (d + b) / 2, the lower triangle
    decomposition     g d^3 / 2            Cholesky d^3 / 6, inverse d^3 / 3
    product           g k d^2              G V or V A, with a factor or an inverse

or, for packed factors on a CPU where the inverse would not pay before the next refresh,

    decomposition     g d^2 (d + 3 b) / 6  Cholesky by blocks
    triangular solve  g k t(d)             two of them instead of a product with the inverse

A step of KFAC takes one product with each inverse, or two triangular solves; FOP's three (F a,
M^-1 a and M^-1 p), or F a and three triangular solves. A factor kept as its diagonal costs next to
nothing. Example: for V [1, 2, 3] the decompositions take (8 + 27) / 2, and FOP's products of a step
3 * 6 * (2 + 3).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fop.linalg import STORAGE, solve_pays

# Rows that a factor is the sum over: only the batch knows, and only an order of size is needed.
NOMINAL_ROWS = 512


@dataclass(frozen=True)
class Passes:
    """What a step does with each factor: products with F, and with M^-1 or triangular solves."""

    fisher: int
    inverse: int
    triangular: int


KFAC_PASSES = Passes(fisher=0, inverse=1, triangular=2)
FOP_PASSES = Passes(fisher=1, inverse=2, triangular=3)


@dataclass(frozen=True)
class Work:
    """One layer's matrix [groups, rows, columns], as far as its costs are concerned.

    `solves_over`: where not None, wide factors are kept as Cholesky factors if that pays within so
    many steps, as on a CPU.
    """

    rows: int
    columns: int
    groups: int = 1
    diagonal_rows: bool = False
    diagonal_columns: bool = False
    solves_over: int | None = None

    def second_moments(self, rows: int) -> float:
        """Of both factors, from `rows` rows of inputs and of output gradients."""
        return float(self.groups * rows * sum(triangle(width) for width, _, _ in self._factors()))

    def decompositions(self) -> float:
        """Of both factors, once."""
        return self.groups * sum(
            width**2 * (width + 3 * STORAGE.block) / 6 if solved else width**3 / 2
            for width, _, solved in self._factors()
        )

    def products(self, passes: Passes = FOP_PASSES) -> float:
        """Of one step."""
        total = 0.0
        for width, other, solved in self._factors():
            square = width**2
            inverse = passes.triangular * triangle(width) if solved else passes.inverse * square
            total += other * (passes.fisher * square + inverse)
        return self.groups * total

    def _factors(self) -> Iterator[tuple[int, int, bool]]:
        """d, k, and whether by triangular solves, of the factors that are not diagonal."""
        of_rows = self.rows, self.columns, self.diagonal_rows
        of_columns = self.columns, self.rows, self.diagonal_columns
        for width, other, diagonal in (of_rows, of_columns):
            steps = self.solves_over if width >= STORAGE.packed_from else None
            if not diagonal:
                yield width, other, steps is not None and solve_pays(width, steps * other)


def triangle(width: int) -> float:
    """t(d): numbers in the lower triangle, by blocks."""
    block = STORAGE.block if width >= STORAGE.packed_from else STORAGE.dense_block
    return width * (width + min(width, block)) / 2


def owner_cost(work: Work, interval: int, passes: Passes = FOP_PASSES) -> float:
    """Of a step, for the rank that owns the layer: all but the second moments."""
    elementwise = 3.0 * work.groups * work.rows * work.columns
    return work.decompositions() / interval + work.products(passes) + elementwise


def refresh_cost(work: Work) -> float:
    """Of one refresh: second moments of a nominal batch, and the decompositions."""
    elementwise = NOMINAL_ROWS * work.groups * (work.rows + work.columns)
    return work.second_moments(NOMINAL_ROWS) + work.decompositions() + elementwise
