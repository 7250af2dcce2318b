"""DFlash: a small network that draft tokens a whole block of tokens at once, from hidden states of the target."""
