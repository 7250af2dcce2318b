"""The MLX backend: a model as a list of operations, run by Apple's MLX, which nothing outside this folder imports."""
