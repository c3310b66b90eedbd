"""Messages on Redis. Celery calls `consumer` and `transport`; the others are called by these and by `boot`.

transport   kombu's channel with an atomic take; messages taken beyond the prefetch count
consumer    Celery's consumer: each message passes the gate first; refuses what Celery cannot run
gate        what a well-formed message is; why others are refused. A new reason goes here;
            one about a header goes into `requests.messages`
inflating   decompression with a limit
held        the messages that a channel holds, and whether it may take more
ledger      who owns which unacknowledged message, in Redis: take, acknowledge, give back
leases      the thread that renews leases, looks who is present, and returns the messages of dead workers
presence    how a killed worker is noticed before its lease expires; lua/restore has the last word
fairness    which tenant's queue is next
prefetch    the prefetch count with messages that wait for their `eta`
quarantine  refused messages: set aside, and their tasks failed
damage      keys of the broker that somebody else has written into
lua/        take; renew: leases; restore: who is dead, and their messages given back
"""
