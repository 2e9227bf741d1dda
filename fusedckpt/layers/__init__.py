"""The fused layers that users call: functions and modules.

Each makes a record of its options and calls blocks.layer_function.run_layer.

    linear, mlp, norm_linear, experts, head   a layer: its function, and its module
    norm, gated_norm, ms_norm, approximate    norms; the paper's norms and activations
    sequential, children                      nn.Sequential whose runs of layers are fused
    sharded                                   layers on a rank's shards
    fallbacks                                 the reasons of modules that do not run fused
"""
