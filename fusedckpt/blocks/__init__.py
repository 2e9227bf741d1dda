"""A fused layer is a program of steps, run by one autograd Function. layer.py tells the story.

programs, head, experts, gated_norm   options of a call, and the program that they make
builder, steps, routed_steps          a program is built of steps; a step writes kernel calls
program, call                         the records: a program; a checked call, and its saved tensors
derive, writer                        the schedules of forward and backward, and their text
layer_function, run, ops              the autograd Function, its schedules at work, its torch ops
validate, operands, quantized         errors of a call; weights with adapters, or dequantized
reader, late                          recipes of saved inputs; gradients that are computed late
eager, compiled                       the reference in torch's ops, and under torch.compile
shown                                 `fusedckpt.explain`
"""
