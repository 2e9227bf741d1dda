"""A fused layer is a program of steps, run by one autograd Function.

A call's options and the shapes of its tensors settle a program (programs.py) of steps (steps.py);
its schedules (derive.py) say which values are computed, saved, recomputed and written over;
run.py runs them on rows; block.py is the Function, ops.py its torch ops.
"""
