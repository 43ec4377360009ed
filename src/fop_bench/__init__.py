"""fop-bench: train, compare, tune and report, from a laptop demo to every recipe of the paper."""
