"""Kernels in Metal, each under the file name of the contract it fulfils. They need the package `mlx` and a Mac."""
