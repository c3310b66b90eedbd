"""One generation task on its way through the engine. Called by `pool`.

driver     drives one job: passes on what happens to it, and carries out what it decides
job        the task in this worker, from its delivery to its acknowledgement: the state machine
effects    what a job decides
intake     the thread that begins attempts and submits requests; an option that the worker acts on is read here
attempts   what a delivery does, by what earlier ones left in Redis
limits     the time limits of a generation
images     the bytes of the images that tasks are about
requests   a task's request as the engine's: an option that the engine acts on is passed on here
engines    creates the engine that the settings name
local      eager tasks and `petiole trace`: the engine in this process
lua/       begin: counts the attempt and the deaths before it
"""
