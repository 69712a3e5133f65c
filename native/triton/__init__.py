"""Triton kernels: the ``native.triton`` provider.

Nothing here imports Triton before a call needs it; ``provider`` holds the provider and its limits.
"""
