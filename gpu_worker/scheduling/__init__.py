"""Decides what the engine computes next, and applies the results: decisions over plain state, without torch.

The engine's loop calls `scheduler`; the other modules are its parts.

    scheduler           the four verbs: schedule, launch, sample, commit
    planning/           selects the sequences of the next step
    state               waiting, prefilling and running sequences, and the transitions between them
    priorities/         who comes first, and who gives way when rows, pages or time run out
    pipeline            the steps in flight, their order and slots: a pure state machine
    launching           the host side of a launch: a transaction until the step is dispatched
    batching            a plan as the arrays of a step
    masks               the token masks of a step's constrained outputs
    stopping            stop conditions on tokens
    scheduled_sequence  the scheduler's sequence: a `sequence` with its request's data
    sequence            the state machine of one sequence, without its request
    outcomes            the types that the state machine uses
"""
