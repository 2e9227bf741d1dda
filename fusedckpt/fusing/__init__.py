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
      | recording.py           runs a copy on meta tensors: its ops, and the state that it reads, in
      |                        the module and outside (../outside). An MLP shows by its products
      |                        and the activation between them; of a norm the rules are proposed
      |                        that may give its numbers
      v
    match                      the function of ours that it computes, its parameters, and guards
      |                        (match_reader.py): the state for which that holds, and the values
      |                        outside that its code reads (../outside/reads.py)
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
        forward (../checkpointing/call_state.py)
    fused_heads.py
        computes a causal model's loss from the input of its output embedding
    ../recipes
        run the original, which saves recipes; recipe_models.py lets all functions of a model do so
"""
