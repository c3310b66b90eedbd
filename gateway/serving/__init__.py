"""Everything with input or output. An interface's endpoints call these rooms:

request_body  a request's body as JSON, within limits
catalogue     the models of the fleet, by name
records       records in Redis
tokenization  tokens counted by a worker
image_urls    images that a request names by URLs, fetched where that is allowed
answering     how a request is answered, now and later: what all interfaces share
generations   a request on its way: submitted, accepted, followed to its end
sse           a stream as server-sent events; clients that leave
egress        which addresses may be connected to, and requests to them
webhooks/     what has ended is told to a tenant's server
auth/         whose key it is, and what it may do
retry         waits for a Redis that is away for a moment; what Redis refuses
"""
