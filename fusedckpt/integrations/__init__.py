"""What libraries that train models take from here: callbacks and overrides, a library a file.

Nothing is imported unless used: `from fusedckpt.integrations.transformers import FuseCallback`.
"""
