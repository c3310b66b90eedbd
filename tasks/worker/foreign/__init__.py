"""Tasks of the application's own, beside the generations. Called by `pool`.

linked  sends links that this worker does not know to the queue of the user's app
tasks   runs foreign tasks on threads, and counts the deaths of workers that ran one
"""
