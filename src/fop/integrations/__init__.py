"""Glue for training libraries, where plain `fop.FOP(model)` is not enough; see docs/trainers.md.

Nothing here is imported by `fop` itself, so the library goes on needing torch alone.
"""
