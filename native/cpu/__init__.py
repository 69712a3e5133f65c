"""C++ kernels for CPUs (LibTorch stable ABI, one build for torch 2.11 to 2.14)."""
