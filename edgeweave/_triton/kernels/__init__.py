"""The Triton kernels; importing a module of this package imports Triton."""
