"""The handlers of each interface's paths. They hold nothing but rooms together: bodies, plans, generations, views.

invocations  /invocations: any of the interfaces below, by what a body has
batches      /files and /batches
responses    /responses
openai       all other paths of OpenAI's, and those that vLLM added
embeddings   /v1/embeddings, /rerank, /score and /classify
anthropic    /messages, and /models for clients of Anthropic's
lora         /load_lora_adapter and /unload_lora_adapter, for those who may
admin        /admin: keys and tenants, for those who may; /key
page         the page: its files, the fleet as JSON, cancel
"""
