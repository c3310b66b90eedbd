"""The threads of an engine. Started by `engine`.

fan_out         a request of many texts: a request for each, and what is made of them in order
history         sequences that remember their transitions, for a debugged or traced engine
loop            the engine thread: launch, sample, commit
inbox           threads with a queue of functions: the one that owns sequences; pools, also of `tasks.worker`
detokenization  the text thread: text, stop strings, deltas, ends
"""
