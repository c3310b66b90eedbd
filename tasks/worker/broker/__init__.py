"""Messages from the broker. Celery calls `consumer` and the two transports; these and `boot` call the other
modules.

transport   on Redis: kombu's channel with an atomic take; messages taken beyond the prefetch count
rabbitmq    on RabbitMQ: kombu's channel, on which an unreadable message is no error of the connection
consumer    Celery's consumer: each message passes the gate first; refuses what Celery cannot run; counts what is
            held for its eta
gate/       checks that a message is well-formed, or refuses it with a reason
held_messages  the messages that a channel holds, and which more it may take
ledger      who owns which unacknowledged message, in Redis: take, acknowledge, give back
leases      the thread that renews leases, looks who is present, and gives back the messages of dead workers
liveness    notices a killed worker before its lease expires; lua/restore decides
fairness    which tenant's queue is next
quarantine  refused messages: set aside, and their tasks failed
corruption  keys of the broker that somebody else has written into
lua/        take; renew: leases; restore: decides who is dead, and gives their messages back
"""
