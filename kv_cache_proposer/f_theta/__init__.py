"""The latent codec: K and V of all layers of an evicted token as one thin code, and f_θ, which turns it back.

`statistics` → `fit` (`basis`, `allocation`, `levels`) → `codec` (`packing`) → `store`. Everything is in closed form.
"""
