"""Benchmarks and demonstrations of fusedckpt: `python -m bench`."""
