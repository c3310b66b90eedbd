"""The peers of Petiole, each used as its own users would use it."""
