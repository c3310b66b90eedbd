"""What is computed next, and what becomes of it: decisions over plain state, torch-free.

The engine's loop calls `scheduler`; the others are its parts.

    scheduler   the four verbs: schedule, launch, sample, commit
    planning    selects the sequences of the next step
    state       waiting, prefilling and running sequences, and the transitions between them
    admission   the waiting queue, the delay gate, images on their way to crops
    preemption  who gives way when rows or pages run out
    pipeline    the steps in flight, their order and slots: a pure state machine
    batching    a plan as the arrays of a step
    masks       the token masks of a step's constrained outputs
    stopping    stop conditions on tokens
    adapters    which adapter has which slot
    scheduled   a `sequence` with its request's data: what the scheduler handles
    sequence    the state machine of one sequence, without its request
    outcomes    the types that the state machine uses
"""
