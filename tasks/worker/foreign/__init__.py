"""Tasks of the application's own, beside the generations. Called by `pool`.

linked  where a link goes that this worker does not know: to the queue of the user's app
tasks   runs them on threads, and counts the deaths of workers that ran one
"""
