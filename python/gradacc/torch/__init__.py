"""PyTorch: gradients from modules and during backward, and hand-over to optimizers."""

from .backward import Attachment

__all__ = ["Attachment"]
