"""`petiole demo` with a model of another kind. Called by `cli`.

search  `--search`: passages found by what they mean
vision  `--vision`: questions about a picture, and the picture with the answers drawn in
"""
