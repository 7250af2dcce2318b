"""A model whose heads and weights several processes have a part of each (tensor parallelism)."""
