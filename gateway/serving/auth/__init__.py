"""Who may ask, and how much. A request's caller is `core.caller.caller()`.

callers       finds the caller of a key or a token; asks for the right that a route needs
api_keys      keys and tenants: in the settings, and in Redis
web_tokens    the JSON Web Tokens of an issuer
signing_keys  that issuer's public keys
hosts         by which names a gateway without keys is called
rate_limits   what a caller may use, and how long a queue may be
budgets       tokens that a tenant may use in a day and in a month
redis_rights  what the gateway's own Redis user may not do
idempotency   which request another one repeats
usage_report  what a caller has used
manage        makes, changes, lists and revokes the keys in Redis
key_list      what is shown and may be changed of keys and tenants over HTTP. Pure
"""
