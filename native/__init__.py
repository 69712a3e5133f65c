"""Kernels and providers: the implementations behind the ops, one adapter per library."""
