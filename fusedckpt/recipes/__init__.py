"""Layers and functions that save recipes of tensors in the place of the tensors.

A recipe (autograd/recipes.py) makes a saved tensor again in backward, from tensors that are saved
anyway. Each file sees other functions of a forward:

    shared_layers.py    linears and activations that are modules, by the recipe of their input
    shared_channels.py  layers of convolutional nets that are modules
    node_recipes.py     functions that code calls between such layers, by their nodes in the graph
    grown_results.py    of these, concatenations and pictures scaled up, as their parts
    shared_code.py      code that calls functions between the linears of an MLP, under a mode
    recipe_mode.py      all functions of a model's forward, under a function mode

All of them use cheap_functions.py, the functions that may run again, dropouts.py, their random
numbers, and recipe_kernels.py, sequences of recipes that one kernel runs.
"""
