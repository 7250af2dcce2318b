"""Drafters and latent codecs: they depend on the engine and implement its protocols."""
