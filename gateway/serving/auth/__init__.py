"""Who may ask, and how much. A request's caller is `core.caller.caller()`.

api_keys      finds the caller of a key: in the settings, and in Redis
hosts         by which names a gateway without keys is called
rate_limits   what a caller may use, and how long a queue may be
budgets       tokens that a tenant may use in a day and in a month
idempotency   which request another one repeats
usage_report  what a caller has used
manage        makes, lists and revokes the keys in Redis, for `petiole keys`
"""
