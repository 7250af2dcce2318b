"""Calibration and training of what sits beside a target: each stage one command, made again from text on disk."""
