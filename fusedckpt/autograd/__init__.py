"""The parts that fused layers share, in the order in which a call meets them.

    arguments   checks one argument
    levels      the save level of a call, which `saving` overrides
    dispatch    decides a call once: its path (Triton, ATen, eager), its program, its phase
    phases      how it saves: with or without hooks, in a checkpoint's forward or recompute
    backward    which gradients are wanted, donated products, second derivatives, and torch ops

A saved tensor that backward can make again is saved as a recipe:

    recipes     a recipe, its readers, the tensor that it replaces
    index       where a tensor comes from: makers put, readers get, by the tensor's storage
    tracker     follows a forward: gives results of its functions recipes, and saves these
    replay      calls a recorded function again

private.py and private_memory.py alone name private parts of torch.
"""
