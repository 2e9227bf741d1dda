"""The fused layers: for each block its ops, its autograd Function, its function and its module.

A call is checked by validate where none like it was settled before, then runs its Function over
fusedckpt.kernels.
"""
