"""Kernels in C++ for the CPU: their sources, what compiles them (`build`), what calls them (`library`), and on how many
cores (`cores`)."""
