"""Models at inference: attention values pruned and in a few bits, in fast kernels."""
