"""Who may ask, and how much. A request's caller is `core.caller.caller()`.

keys     finds the caller of a key: in the settings, and in Redis
hosts    by which names a gateway without keys is called
limits   what a caller may use, and how long a queue may be
running  which tasks count as running although they have ended
retries  which request another one repeats
usage    what a caller has used
manage   makes, lists and revokes the keys in Redis, for `petiole keys`
"""
