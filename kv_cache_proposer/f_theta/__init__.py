"""The latent codec: K and V of all layers of an evicted token as one small code, and f_θ, which decodes it.

`statistics` → `fit` (`basis`, `allocation`, `levels`) → `codec` (`packing`) → `store`. Everything is in closed form.
Where a code is made of a drafter's taps: `tap_statistics` → `tap_codec`.
"""
