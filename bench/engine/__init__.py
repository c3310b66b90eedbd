"""The engine driven directly, and whether a worker around it, or around vLLM's, keeps up.

__main__     `python -m bench.engine`
features     the speed on a model, and the gain of each feature
groups       models whose layers do not keep everything, beside a dense one
returning    a conversation that comes back after eviction, or on a new worker
chunks       prefill policies and chunk sizes
beside       chat beside rows of a batch that fill the engine
growth       how costs grow with numbers
pace         a worker and its readers around a device as fast as a GPU, which only keeps time
vllm_engine  vLLM's engine behind a worker, against vLLM alone
observed     an engine that watches the threads of its worker
profiling    where the time of a step goes
"""
