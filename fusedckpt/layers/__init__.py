"""The fused layers: for each block its ops, its autograd Function, its function and its module.

A call is checked once (validate), then runs its Function over ops made of fusedckpt.kernels.
"""
