"""For an application's own tests. Called by applications, as `petiole.testing`; nothing of Petiole calls it.

worker  a real worker on petiole-tiny, and a Redis of the tests
fake    a worker without a model, on a thread of the test's process: it takes messages and runs Celery's trace
stream  the stream of one task, written with a worker's scripts
script  what the fake answers, and the tasks that it has had
here    makes this process submit to the tests' Redis
"""
