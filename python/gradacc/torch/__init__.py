"""PyTorch: gradients from modules and during backward, and hand-over to optimizers."""

from .backward import Attachment
from .optimizer import AccumulatingOptimizer

__all__ = ["AccumulatingOptimizer", "Attachment"]
