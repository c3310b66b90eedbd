"""Webhooks: a tenant's server is told of what has ended, and of budgets. A *notice* waits in Redis until the
server has taken it, or for `queue.TRIED_FOR_S`, whichever gateway dies meanwhile. Background responses that run
are *watched*: the script that ends a task makes its response due at once, and each is also looked at now and then.

dispatcher    looks at what is watched, and sends what is due: one in each gateway
budget_watch  looks at what tenants have used of their budgets
queue         watched responses and notices in Redis. What ends in another way calls its `notify`
receivers     where each tenant's notices go
"""
