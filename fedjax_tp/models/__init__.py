"""Flax modules that know nothing of federation, and the tasks made of them."""

from fedjax_tp.models import attention, cnn, layers, task, vit

__all__ = ["attention", "cnn", "layers", "task", "vit"]
