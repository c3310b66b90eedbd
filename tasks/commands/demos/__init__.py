"""`petiole demo`. Called by `cli`.

demo    an embedded Redis, a worker and eight streams
search  `--search`: passages found by what they mean
vision  `--vision`: questions about a picture, and the picture with the answers drawn in
"""
