"""The fused layers that users call, a file for each kind.

Each file has, in this order, the steps of the layer, the record of its options, which makes the
program of a call and has the eager reference, its functions, and its modules. blocks/ runs them.

    norm, gated_norm                          norms, alone and before linears
    linear, norm_linear, mlp                  linears; `LinearOptions` in linear.py is of all three
    experts, head                             mixtures of experts; a linear with its loss
    ms_norm, approximate                      the paper's norms and activations
    sequential, children                      nn.Sequential whose runs of layers are fused
    sharded                                   layers on a rank's shards
    fallbacks                                 the reasons of modules that do not run fused
"""
