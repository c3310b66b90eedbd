"""What a request, a result, a setting and a task are, for every floor: producer, gateway, worker and engine.

The lowest floor: everybody may import it, and it imports nothing of Petiole's, no torch, numpy, Celery or Redis.
Each line may import what stands below it.

tasks      the table of tasks: names, types of requests, what a chain fills, what is answered
types      requests and results as TypedDicts, for type checkers and editors: `python -m docs.render` writes it
requests/  the options of each task: types, limits, defaults, meanings
results/   what a task answers: deltas, ends, results, vectors
settings/  the settings of the engine and of the gateway
limits     the limits of a request's numbers, texts and lists
errors     a request that is refused, and by which of its fields
"""
