"""Data sets, who holds which examples, and both on the device."""

from fedjax_tp.data import catalog, federated, partition

__all__ = ["catalog", "federated", "partition"]
