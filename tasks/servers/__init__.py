"""How to reach Redis: for every room of `tasks` that talks to it.

_supervisor  the process that runs an embedded server; `embedded` starts it as a script
answers      answers that are no valid reply: garbage, damaged keys
connections  one connection pool a process and one an event loop: where everybody gets a client
embedded     `embedded://`: one redis-server for all processes of a user
eviction     a warning, at a worker's start, of a Redis that evicts keys
masters      connection pools that follow the master after a failover
redis_py     what differs between the versions of redis-py
sentinels    connections that ask the sentinels for the master
"""
