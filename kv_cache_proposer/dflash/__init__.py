"""DFlash: a small network that guesses a whole block of tokens at once, from hidden states of the target."""
