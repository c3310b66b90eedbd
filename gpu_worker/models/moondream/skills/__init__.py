"""The skills of Moondream 2: how each asks, which tokens may answer, and what the answer is.

query    a question, about a picture or not; with reasoning if asked
caption  a picture in words
finding  point: where things are; detect: boxes around things
options  the checks of a call's options
"""

from petiole.gpu_worker.models.moondream.skills import caption, finding, query

SKILLS = {"query": query.ask, "caption": caption.ask, "point": finding.point, "detect": finding.detect}
"""By name: (options, the model's configuration, how many images, codec) -> Asked. Each raises InvalidRequest."""
