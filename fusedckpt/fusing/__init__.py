"""`fuse` changes the classes of modules in place, to classes that save less for backward.

It decides once, while `fuse` runs; the forward of a swapped module runs in each call.

While `fuse` runs (fuser.py):

    model
      | search.py              the modules that the call asks for
      | find_swaps.py          walks over norms, MLPs, linears, Sequentials and experts, and decides
      |                        once for all equal modules
      | mixers.py              finds attention and mixers, by their code or in a run
      | first_step.py          lets modules wait for their first training call
      | fused_heads.py         finds output embeddings of causal models
      | match_shared.py        finds layers that may save a recipe of their input
      v
    one module: norms.py, match_mlps.py, experts.py
      | recording.py           runs a copy on meta tensors: its ops, and the state that it reads;
      |                        state outside of the module that its code writes is put back
      |                        (outside_state.py); reads of sizes and other state of tensors, for
      |                        which another call may compute another function, are noted
      |                        (tensor_reads.py)
      |                        An MLP shows by its products and the activation between them; of a
      |                        norm the rules are proposed that may give its numbers
      v
    match                      the function of ours that it computes, its parameters, and guards
      |                        (match_reader.py): the state for which that holds, and the values
      |                        outside (outside_reads.py) that its code reads, as the code that ran
      |                        names them (code_watch.py, code_names.py, outside_code.py)
      | verification.py        decides: runs replicas (replica.py), compares a norm's numbers with
      |                        those of rules, and outputs and gradients by the error rule
      |                        (accuracy.py), and counts saved bytes
      v
    Swap (swap.py)             the module's new class and attributes
    or NotFused (reasons.py)   for modules that look like one of these
      v
    FuseReport (fuse_report.py); FusedCalls tells reports which modules ran fused in a step

In each call of a swapped module (Swapped in swap.py):

    norms.py, fused_mlps.py, experts.py
        read the state and the weights as they are now, by a reader that the match is compiled to
        (match_reader.py; of linears adapters.py), and call a function of `functional`; or return a
        NotFused, which is noted, and the original runs
    recomputed_modules.py
        runs the original in a checkpoint (recomputed_call.py); the recompute gets the state of the
        forward (call_state.py, written_tensors.py)
    fused_heads.py
        computes a causal model's loss from the input of its output embedding
    shared_layers.py
        runs the original, which saves a recipe of its input
    shared_channels.py
        the same of layers of convolutional nets, by the recipes of the layers before them, and of
        functions that the model's code calls between them (node_recipes.py)
    recipe_models.py
        lets all functions that a model calls save recipes (recipe_mode.py, cheap_functions.py,
        dropouts.py, recipe_kernels.py)
"""
