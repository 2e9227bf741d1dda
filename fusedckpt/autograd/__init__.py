"""The parts that fused layers share, in the order in which a call meets them.

    arguments   checks one argument
    levels      the save level of a call, which `saving` overrides
    dispatch    decides a call once: its path (Triton, ATen, eager), its program, its phase
    phases      how it saves: with or without hooks, in a checkpoint's forward or recompute
    backward    which gradients are wanted, donated products, second derivatives, and torch ops

A saved tensor that backward can make again is saved as a recipe:

    recipes     a recipe, its readers, the tensor that it replaces
    origins     finds the recipe of a tensor by its node in autograd's graph
    tracker     finds it by the tensor's storage, in a forward that is followed
    replay      calls a recorded function again

private.py and private_*.py alone name private parts of torch.
"""
