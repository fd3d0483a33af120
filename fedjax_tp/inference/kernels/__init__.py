"""Pallas kernels for GPU and TPU."""
