"""Tests of the C++ kernels for CPUs."""
