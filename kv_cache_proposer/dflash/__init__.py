"""DFlash: a small network that drafts a whole block of tokens at once, from hidden states of the target."""
