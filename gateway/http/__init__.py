"""The HTTP server: the application, and what happens to each request before a handler has it.

server          `petiole serve`: the application under uvicorn
application     the ASGI application: which room answers which path
connections     a client's HTTP connection: a request that does not arrive ends
observability   the access log and the figures, without prompts; faults of the gateway itself
headers         headers within limits
cors            which web pages may call it
authentication  who asks: a key and its tenant, before anything else is done
dialects        in which form a client is told of an error: that of its interface
"""
