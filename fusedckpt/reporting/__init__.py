"""`report`: runs one training step as a trial, and says where its memory goes.

    trial, containers   back the model up, and put it back afterwards
    step                the step: forward, loss, backward, optimizer
    timeline            the profiler's events -> live bytes at every moment, by phase and module
    memory_report       the same, with the tensors that autograd saves: a MemoryReport
    memory_text, memory_plot   print and draw it (tables, figure)

`estimate` takes the same step on tensors without memory, for the same MemoryReport:

    meta_step           moves model, optimizer and inputs to the meta device meanwhile
    without_memory      ops there -> live bytes at every moment, by phase and module
    factory             a model that a command's factory makes there, or on a device
    versions            of which a record of a command was made

`report_on_oom` reads the allocator's history of a step that failed (out_of_memory).
"""
