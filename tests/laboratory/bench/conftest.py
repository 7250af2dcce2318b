"""Benchmarks are tested with what those of the runtime are."""

from tests.cli.conftest import no_settings_of_our_own, tiny_folder

__all__ = ["no_settings_of_our_own", "tiny_folder"]
