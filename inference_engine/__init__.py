"""The Kakeya runtime: sessions in, tokens out."""

__version__ = "0.1.0"
