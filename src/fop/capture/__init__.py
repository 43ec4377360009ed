"""What backward passes leave behind for the layers of a model: recorded, counted and kept."""

from fop.capture.attention import hook_attention
from fop.capture.autograd import hook_gradient, hook_module
from fop.capture.belongs import gradient_norms, gradient_ratios
from fop.capture.examples import hook_batch
from fop.capture.fisher import ExtraPass, hook_output
from fop.capture.forwards import Forward, Forwards
from fop.capture.hooks import RemovableHandles, take_over
from fop.capture.plan import CapturePlan
from fop.capture.recorder import Recorder
from fop.capture.squares import Eigenbasis
from fop.capture.statistics import Sample, Statistics, factor_dtype

__all__ = [
    "CapturePlan",
    "Eigenbasis",
    "ExtraPass",
    "Forward",
    "Forwards",
    "Recorder",
    "RemovableHandles",
    "Sample",
    "Statistics",
    "factor_dtype",
    "gradient_norms",
    "gradient_ratios",
    "hook_attention",
    "hook_batch",
    "hook_gradient",
    "hook_module",
    "hook_output",
    "take_over",
]
