"""Vectors and scores of texts over HTTP. Each line may import what stands below it.

endpoints  the handlers of /v1/embeddings, /rerank and /score
requests   embeddings as OpenAI has them, rerank as Cohere, Jina and vLLM, score as vLLM: a plan, and the answer
"""
