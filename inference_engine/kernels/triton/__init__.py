"""Kernels in Triton, each under the file name of the contract it fulfils. They need the package `triton`."""
