"""Tasks of the application's own, beside the generations. Called by `pool`.

tasks   runs foreign tasks on threads, and counts the deaths of workers that ran one
"""
