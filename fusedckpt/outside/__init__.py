"""The values outside of a module that the code of its forward reads and writes.

A forward computes by more than its module: by global variables, closed-over ones, options of
libraries, the sizes of its input. While `fuse` records it:

    watch.py       sees the functions that run; their names (state/code_names.py) tell the rest
    writes.py      notes the variables that they name, and puts back those that were written
    find_reads.py  finds the values that they read, each with the place where it is found again
    sizes.py       notes sizes and other state of tensors that they read or compare

In each call of a swapped module:

    reads.py       compares these values with those of the match
"""
