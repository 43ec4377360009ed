"""1,797 handwritten digits, 8 x 8 pixels with 17 grey levels; part of the package.

The test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, UCI Machine
Learning Repository, 1998, https://doi.org/10.24432/C50P49, licence CC BY 4.0), stored as IDX files.
"""

from __future__ import annotations

from importlib.resources import as_file, files

from fop_bench.data.idx import load_images
from fop_bench.data.selection import hold_out
from fop_bench.data.splits import Images

TEST_FRACTION = 0.2
WHITE = 16.0


def load_digits() -> tuple[Images, Images]:
    """(training images, test images): a fixed split, a fifth of every class for the test."""
    with as_file(files("fop_bench.data") / "embedded") as folder:
        digits = load_images(
            folder / "digits-images-idx3-ubyte.gz", folder / "digits-labels-idx1-ubyte.gz", 10
        )
    training, test = hold_out(digits.labels, TEST_FRACTION)
    return digits.select(training), digits.select(test)
