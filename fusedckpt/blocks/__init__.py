"""The machinery of every fused layer: a program of steps, in one autograd Function.

layer.py tells the story. The options, steps and reference of each layer are in its file of layers/.

program, call                         the records: a program; a checked call, and its saved tensors
builder, steps                        a program is built of steps; the steps that layers share
derive, writer                        the schedules of forward and backward, and their text
layer_function, run, ops              the autograd Function, its schedules at work, its torch ops
passes                                what a schedule calls beside the kernels
validate, operands, quantized         errors of a call; weights with adapters, or dequantized
reader, late                          recipes of saved inputs; gradients that are computed late
eager, compiled                       shared parts of the reference; it under torch.compile
shown                                 `fusedckpt.explain`
"""
