"""Callbacks and overrides for libraries that train models, a library a file.

Nothing is imported unless used: `from fusedckpt.integrations.transformers import FuseCallback`.
"""
