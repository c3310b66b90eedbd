"""`petiole demo`. Called by `cli`.

streams  eight streams at once
search   `--search`: passages found by what they mean
vision   `--vision`: questions about a picture, and the picture with the answers drawn in
demo     what all share: an embedded Redis and a worker
"""
