"""Vectors and scores of texts over HTTP. Each line may import what stands below it.

endpoints  the handlers of /v1/embeddings, /rerank, /score and /classify
requests   embeddings as OpenAI has them, rerank as Cohere, Jina and vLLM, score and classify as vLLM: a plan, and
           the answer
"""
