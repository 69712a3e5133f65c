"""Provider of CUDA that is torch's own: matrix products of its vendor libraries under the contracts of our ops."""
