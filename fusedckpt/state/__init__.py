"""The state of a program beside its tensors: how it is read, compared and put back.

Code that runs foreign code twice, or on trial, uses these:

    rng.py      random number generators: torch's of the CPU and of devices, numpy's, Python's, and
                those that objects have for themselves
    holders.py  containers, attributes and slots, read and filled past the methods of their classes
    noted.py    the state of objects and of those inside, by reference
    variables.py, code_names.py
                the variables outside of a model that its code may write, by the names in the code
    tensors.py  the values of tensors
"""
