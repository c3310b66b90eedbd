"""One generation task on its way through the engine. Called by `pool`.

driver           drives one job: passes events to it, and carries out its effects
settlement       the task as Celery has it: accepted, started, completed, its message settled
job              the task in this worker, from its delivery to its acknowledgement: the state machine
effects          the decisions of a job
intake           the thread that begins attempts and submits requests; an option for the worker is read here
attempts         what a delivery does, from what earlier ones left in Redis; its attempt in the engine: request,
                 output, spans
engine_requests  turns a task's request and images into the engine's; an option for the engine is passed on here
presentation     what readers need to divide the text, and its parts in the result; calls that are enforced
engines          creates the engine that the settings name
counting         counts of tokens: the threads that take them from their own queues, and the answer
local            eager tasks, `petiole trace` and `petiole plan`: the engine in this process
"""
