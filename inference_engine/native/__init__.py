"""Kernels in C++ for the CPU: their sources, what compiles them (`build`), and what calls them (`library`)."""
