"""How to reach Redis: for every room of `tasks` that talks to it.

_supervisor  the process that runs an embedded server; `embedded` starts it as a script
replies      recognises answers that are not valid replies: garbage, damaged keys
connections  one connection pool for each process and one for each event loop: every client comes from here
embedded     `embedded://`: one redis-server for all processes of a user
eviction     a warning, at a worker's start, of a Redis that evicts keys
failover     connection pools that follow the master after a failover
redis_py     what differs between the versions of redis-py
sentinels    connections that ask the sentinels for the master
shared       one connection for the commands of all callers of an event loop
"""
