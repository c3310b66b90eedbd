"""Vectors and scores of texts over HTTP.

interfaces  embeddings as OpenAI has them, rerank as Cohere, Jina and vLLM, score and classify as vLLM
"""
