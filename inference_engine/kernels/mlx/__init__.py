"""Array operations on Apple's GPU, as kernels in Metal that MLX compiles. Nothing outside `backends/mlx` imports them."""
